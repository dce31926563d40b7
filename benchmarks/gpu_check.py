"""Checks that need a GPU: ``python benchmarks/gpu_check.py`` from the root of the repository.

On CUDA, generation's log-probabilities against a training forward (fp32 and bf16, with and without CUDA graphs),
completions against those of the CPU, and the tiny recipes end to end over NCCL on every GPU of the node. Prints one
JSON object last; without a GPU it says that nothing ran.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from torchtune_grpo.generation import Generate
from torchtune_grpo.logprobs import DenseLogprobs
from torchtune_grpo.models import tiny_llama
from torchtune_grpo.types import PromptBatch, Rollout

PAD, STOP, VOCAB = 0, 1, 59


def prompts(count: int) -> PromptBatch:
    """Random left-padded prompts of 3 to 40 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 41, (count,), generator=generator)
    width = int(lengths.max())
    tokens = torch.randint(2, VOCAB, (count, width), generator=generator)
    tokens[torch.arange(width) < width - lengths[:, None]] = PAD
    return PromptBatch(
        tokens=tokens,
        lengths=lengths,
        seeds=torch.arange(count),
        pad_id=PAD,
        stop_ids=(STOP,),
        answers=[""] * count,
        solutions=[[]] * count,
        source=[""] * count,
    )


def rollout_on(device: str, dtype: torch.dtype, *, graphs: bool = False) -> tuple[Rollout, float, float]:
    """A rollout, the largest difference of its log-probabilities to a training forward, and tokens/s."""
    torch.manual_seed(0)
    model = tiny_llama(VOCAB).to(device, dtype)
    generate = Generate(group_size=8, max_new_tokens=64, cuda_graphs=graphs)
    generate(model, prompts(16))  # warm-up
    start = time.perf_counter()
    rollout = generate(model, prompts(16))
    tokens = int(rollout.response_mask.sum())  # waits for the device
    seconds = time.perf_counter() - start
    with torch.no_grad():
        difference = (DenseLogprobs()(model, rollout) - rollout.old_logprobs).abs().max()
    return rollout, float(difference), tokens / seconds


def recipes_on_all_gpus(folder: Path) -> bool:
    """SFT, then a few steps of GRPO and of distillation from both on every GPU of the node, bf16 compute."""
    tune = str(Path(sys.executable).with_name("tune"))
    ranks = str(torch.cuda.device_count())
    common = ["device=cuda", "dtype=bf16", "num_threads=4"]
    sft = [f"output_dir={folder}/sft", "total_steps=60", f"examples_per_step={8 * int(ranks)}"]
    grpo = [
        f"output_dir={folder}/grpo",
        f"weights={folder}/sft",
        "total_steps=3",
        f"prompts_per_step={4 * int(ranks)}",
    ]
    opd = [
        f"output_dir={folder}/opd",
        f"weights={folder}/sft",
        f"teachers.growth.weights={folder}/sft",
        f"teachers.decline.weights={folder}/grpo",
        "teachers.growth.dtype=bf16",
        "teachers.decline.dtype=bf16",
        "objective.payload.dtype=bf16",
        "teacher_heads=offload",
        f"tensor_parallel={2 if int(ranks) % 2 == 0 else 1}",
        "total_steps=3",
        "lr_scheduler.num_warmup_steps=0",
        f"prompts_per_step={4 * int(ranks)}",
    ]
    for recipe, config, overrides in (
        ("sft_warmup_distributed", "sft_warmup", sft),
        ("grpo_full_finetune_distributed", "grpo", grpo),
        ("opd_full_finetune_distributed", "opd", opd),
    ):
        command = [
            tune,
            "run",
            "--nproc_per_node",
            ranks,
            f"recipes/{recipe}.py",
            "--config",
            f"configs/tiny/{config}.yaml",
        ]
        if subprocess.run([*command, *common, *overrides]).returncode:
            return False
    return True


def main() -> None:
    if not torch.cuda.is_available():
        print("Did not run: this machine has no CUDA device.")
        print(json.dumps({"ran": False}))
        return
    cpu, cpu_difference, _ = rollout_on("cpu", torch.float32)
    result = {"ran": True, "gpu": torch.cuda.get_device_name(), "cpu_fp32_difference": cpu_difference}
    for name, dtype, graphs in (
        ("fp32", torch.float32, False),
        ("fp32_graphs", torch.float32, True),
        ("bf16", torch.bfloat16, False),
        ("bf16_graphs", torch.bfloat16, True),
    ):
        rollout, difference, rate = rollout_on("cuda", dtype, graphs=graphs)
        result |= {f"{name}_difference": difference, f"{name}_tokens_per_second": rate}
        if dtype == torch.float32:
            same = rollout.tokens.shape == cpu.tokens.shape and bool((rollout.tokens.cpu() == cpu.tokens).all())
            result[f"{name}_same_tokens_as_cpu"] = same
    with tempfile.TemporaryDirectory() as folder:
        result["recipes_ok"] = recipes_on_all_gpus(Path(folder))
    print(json.dumps(result))


if __name__ == "__main__":
    main()

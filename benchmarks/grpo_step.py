"""Seconds of one GRPO step: this project's recipe, dense and with a shared prefix, against TRL's ``GRPOTrainer``.

    python benchmarks/grpo_step.py --model-dir models/SmolLM2-135M-Instruct --data gsm8k/train.jsonl
    python benchmarks/grpo_step.py --quick

The same model, 4 prompts x 8 completions of 64 forced tokens, temperature 1, no KL term, one AdamW update in
micro-batches of one group, no activation checkpointing, the same number of threads; both of the recipe's arms take
the LM head's log-probabilities in chunks (``dev.chunked_logprobs``), TRL's its own way. Each arm is a process of
its own; the recipe runs through ``tune run`` and its times come from its own metrics. The first step of each warms up.
The last line is one JSON object; an arm that does not exist or is not installed is null, and said so.
"""

import importlib.util
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from inputs import Size, check, parser, random_llama

ROOT = Path(__file__).parent.parent
FULL = Size(prompts=4, group=8, prompt=512, response=64)
QUICK = Size(prompts=2, group=4, prompt=512, response=16)
SHARED_PREFIX = "dev.shared_prefix.SharedPrefixLogprobs"
HEAD = "dev.chunked_logprobs.ChunkedHead"


def recipe_step(args, model_dir: str, data: str, size: Size, output_dir: str, *overrides: str) -> dict[str, float]:
    """Mean seconds of a step and of its phases, the first step left out."""
    sizes = json.loads((Path(model_dir) / "config.json").read_text())
    settings = {
        "output_dir": output_dir,
        "device": args.device,
        "dp_replicate": 1,
        "tokenizer.path": args.tokenizer_dir,
        "weights": model_dir,
        "model.vocab_size": sizes["vocab_size"],
        "model.num_layers": sizes["num_hidden_layers"],
        "model.num_heads": sizes["num_attention_heads"],
        "model.num_kv_heads": sizes["num_key_value_heads"],
        "model.embed_dim": sizes["hidden_size"],
        "model.intermediate_dim": sizes["intermediate_size"],
        "model.rope_base": int(sizes["rope_theta"]),
        "dataset.path": data,
        "dataset.partition": "0-0/1",
        "prompts_per_step": size.prompts,
        "max_prompt_tokens": size.prompt,
        "max_tokens_per_micro_batch": size.group * (size.prompt + size.response) // 2,
        "total_steps": args.steps + 1,
        "logprobs.head._component_": HEAD,
        "generate._component_": "benchmarks.forced_length.ForcedLength",
        "generate.group_size": size.group,
        "generate.max_new_tokens": size.response,
        "evaluation.test.dataset.path": data,  # a token of one question: evaluation is not measured
        "evaluation.test.dataset.split": "train",
        "evaluation.test.dataset.limit": 1,
        "evaluation.test.generate.max_new_tokens": 1,
        "lr_scheduler.num_warmup_steps": 0,
        "metric_loggers": "[]",
        "checkpoints.keep_best": 0,
        "checkpoints.every_n_steps": 1000,
        "num_threads": args.threads,
    }
    command = [sys.executable, "-m", "torchtune._cli.tune", "run", "--nproc_per_node", "1"]
    command += ["recipes/grpo_full_finetune_distributed.py", "--config", "configs/smollm2_135m/grpo.yaml"]
    command += [f"{key}={value}" for key, value in settings.items()] + list(overrides)
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"TQDM_DISABLE": "1"})
    lines = [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "seconds/rollout" in line]
    phases = {key for key in lines[-1] if key.startswith("seconds/")}
    times = {key.removeprefix("seconds/"): fmean(line[key] for line in lines[1:]) for key in sorted(phases)}
    return {"step": fmean(b["time_s"] - a["time_s"] for a, b in pairwise(lines)), **times}


def trl_step(args, model_dir: str, data: str, size: Size, output_dir: str) -> float:
    """Mean seconds of a training step of TRL's trainer, the first left out."""
    command = [sys.executable, str(Path(__file__).with_name("trl_step.py")), model_dir, args.tokenizer_dir, data]
    command += [str(n) for n in (size.prompts, size.group, size.response, args.steps, args.threads)]
    command += [output_dir, args.device]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    return json.loads(out.splitlines()[-1])["seconds"]


def write_questions(path: Path, source: str | None, count: int) -> None:
    """``count`` questions as JSONL: those of ``source``, or made-up ones."""
    if source is None:
        rows = [{"question": f"What is {i} + {i}? " * 3, "answer": f"It is. #### {2 * i}"} for i in range(count)]
    else:
        rows = [json.loads(line) for line in Path(source).read_text().splitlines()[:count]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=3, help="measured steps of each arm")
    args = options.parse_args()
    check(args)
    size = QUICK if args.quick else FULL
    args.steps = 1 if args.quick else args.steps
    args.tokenizer_dir = str(ROOT / "torchtune_grpo/data/tiny_tokenizer") if args.quick else args.model_dir
    with TemporaryDirectory() as scratch:
        folder, questions = Path(scratch), Path(scratch) / "questions.jsonl"
        write_questions(questions, None if args.quick else args.data, size.prompts)
        model_dir = args.model_dir
        if args.quick:
            model_dir = str(folder / "model")
            random_llama(Path(model_dir))
        result = measure(args, model_dir, str(questions), size, folder)
    print(json.dumps(result))


def measure(args, model_dir: str, data: str, size: Size, folder: Path) -> dict[str, float | None]:
    print(f"{size}, {args.threads} threads, device {args.device}, mean of {args.steps} steps after one to warm up")
    dense = recipe_step(args, model_dir, data, size, str(folder / "dense"))
    print("dense          " + _row(dense))
    shared = None
    if (ROOT / "dev/shared_prefix").is_dir():
        shared = recipe_step(
            args, model_dir, data, size, str(folder / "shared"), f"logprobs._component_={SHARED_PREFIX}"
        )
        print("shared prefix  " + _row(shared))
    else:
        print("shared prefix  not measured: dev.shared_prefix does not exist")
    trl = None
    if importlib.util.find_spec("trl") and importlib.util.find_spec("accelerate"):
        trl = trl_step(args, model_dir, data, size, str(folder / "trl"))
        print(f"TRL            step {trl:.2f} s")
    else:
        print("TRL            not measured: pip install trl accelerate")
    if args.device == "cpu":
        print("CUDA           not run (--device cuda on a machine with a GPU)")
    return {
        "trl_s": trl,
        "dense_s": dense["step"],
        "dense_speedup": trl / dense["step"] if trl else None,
        "shared_prefix_s": shared["step"] if shared else None,
        "shared_prefix_speedup": trl / shared["step"] if trl and shared else None,
    }


def _row(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f} s" for name, value in times.items())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()

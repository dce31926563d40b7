"""TRL's arm of ``grpo_step.py``, a process of its own; prints ``{"seconds": mean seconds of a step}`` last."""

import json
import sys
import time
from pathlib import Path
from statistics import fmean

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from torchtune_grpo.data import Prompt

# transformers renamed it
CHECKPOINTING = (
    "activation_checkpointing" if hasattr(GRPOConfig, "activation_checkpointing") else "gradient_checkpointing"
)


class StepTimer(TrainerCallback):
    """Seconds from the begin of a step, its rollout included, to its end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args, **kwargs) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *args, **kwargs) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def uneven(completions: list[str], **_: object) -> list[float]:
    """Rewards that differ within a group, so that no term of the loss vanishes."""
    return [float(i % 2) for i in range(len(completions))]


def main() -> None:
    model_dir, tokenizer_dir, data, *numbers, output_dir, device = sys.argv[1:]
    prompts, group, response, steps, threads = map(int, numbers)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    questions = [json.loads(line)["question"] for line in Path(data).read_text().splitlines()]
    timer = StepTimer()
    config = GRPOConfig(
        output_dir=output_dir,
        use_cpu=device == "cpu",
        bf16=False,
        **{CHECKPOINTING: False},
        per_device_train_batch_size=group,
        gradient_accumulation_steps=prompts,
        num_generations=group,
        max_completion_length=response,
        generation_kwargs={"min_new_tokens": response},
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        num_iterations=1,
        max_steps=steps + 1,
        learning_rate=1e-5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=model_dir,
        args=config,
        reward_funcs=uneven,
        train_dataset=Dataset.from_list([{"prompt": Prompt().text(q)} for q in questions]),
        processing_class=AutoTokenizer.from_pretrained(tokenizer_dir),
        callbacks=[timer],
    )
    trainer.train()
    print(json.dumps({"seconds": fmean(timer.seconds[1:])}))


if __name__ == "__main__":
    main()

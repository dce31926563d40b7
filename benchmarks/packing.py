"""Tokens that four ways to fill micro-batches run the model on: ``python benchmarks/packing.py`` from the root.

``padded``: whole groups, never cut, not even where one exceeds the capacity (the stable ``DenseLogprobs``);
``packed``: rows first-fit without padding (``PackedLogprobs``); ``shared_packed``: the same bins with each prompt once
a bin; ``shared_prefix``: bins that keep siblings together (``SharedPrefixLogprobs``). Planned for the same rollouts,
nothing is trained. Reported:

- ``padding_tokens``: positions that hold no token;
- ``repeated_prompt_tokens`` and ``prompt_copies``: prompts beyond the first copy of each;
- ``wasted``: both, as a share of all positions that the model runs on;
- ``fill``: real tokens over bins * capacity, what a device with room for ``capacity`` tokens is used for.

Prompt lengths: GSM8K's in the R1 template with ``--data`` and ``--model-dir``, else log-normal. Response lengths:
log-normal around the reference answer's length (around 120 tokens without data), at most 512.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # `dev` is used from the checkout
from dev.packing import plan_groups, plan_rows
from torchtune_grpo.data import Prompt, Tokenizer
from torchtune_grpo.microbatches import plan_whole_groups
from torchtune_grpo.types import Rollout

CAPACITIES = (2048, 4096, 8192, 16384)
LONGEST_RESPONSE = 512
PLANS: dict[str, Callable[[Rollout, int], list[Tensor]]] = {
    "padded": plan_whole_groups,
    "packed": plan_rows,
    "shared_packed": plan_rows,
    "shared_prefix": plan_groups,
}


def lengths_of_data(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Prompt and reference answer lengths in tokens, of the first questions of a GSM8K file."""
    tokenizer, prompt = Tokenizer(path=args.model_dir), Prompt()
    lines = Path(args.data).read_text().splitlines()[: args.rollouts * args.prompts]
    problems = [json.loads(line) for line in lines]
    prompts = [len(prompt.encode(tokenizer, problem["question"])) for problem in problems]
    return torch.tensor(prompts), torch.tensor([len(tokenizer.encode(problem["answer"])) for problem in problems])


def random_lengths(args: argparse.Namespace, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    count = args.rollouts * args.prompts
    prompts = log_normal(torch.full((count,), 140.0), 0.3, generator)
    return prompts, log_normal(torch.full((count,), 120.0), 0.4, generator)


def log_normal(median: Tensor, spread: float, generator: torch.Generator) -> Tensor:
    noise = torch.randn(median.shape, generator=generator)
    return (median * (spread * noise).exp()).round().clamp(1, LONGEST_RESPONSE).long()


def rollout_of(prompts: Tensor, responses: Tensor, group_size: int) -> Rollout:
    """Rows with these lengths; tokens and log-probabilities are zeros."""
    rows, width = len(prompts), int(prompts.max())
    mask = torch.arange(int(responses.max())) < responses[:, None]
    columns = torch.arange(width + mask.shape[1])
    return Rollout(
        tokens=torch.zeros(rows, len(columns), dtype=torch.int64),
        positions=(columns - (width - prompts)[:, None]).clamp(min=0),
        response_mask=mask,
        old_logprobs=torch.zeros(mask.shape),
        truncated=torch.zeros(rows, dtype=torch.bool),
        groups=torch.arange(rows) // group_size,
        answers=[""] * rows,
        source=[""] * rows,
        group_size=group_size,
        cache_bytes=0,
    )


def positions_of(method: str, rollout: Rollout, rows: Tensor) -> tuple[int, int, int]:
    """Of one bin: positions that the model runs on, those that hold a token, and copies of prompts."""
    prompts, responses = rollout.prompt_lengths[rows], rollout.response_lengths[rows]
    if method == "padded":
        return len(rows) * int(prompts.max() + responses.max()), int(prompts.sum() + responses.sum()), len(rows)
    if method == "packed":
        total = int(prompts.sum() + responses.sum())
        return total, total, len(rows)
    first_of_group = torch.cat([torch.ones(1, dtype=torch.bool), rollout.groups[rows].diff() != 0])
    total = int(prompts[first_of_group].sum() + responses.sum())
    return total, total, int(first_of_group.sum())


def measure(method: str, rollouts: list[Rollout], capacity: int) -> dict:
    start = time.perf_counter()
    plans = [PLANS[method](rollout, capacity) for rollout in rollouts]
    seconds = time.perf_counter() - start
    bins = [positions_of(method, rollout, rows) for rollout, plan in zip(rollouts, plans, strict=True) for rows in plan]
    positions, tokens, copies = (sum(column) for column in zip(*bins, strict=True))
    siblings = slice(None, None, rollouts[0].group_size)
    once = sum(int(r.prompt_lengths[siblings].sum() + r.response_lengths.sum()) for r in rollouts)
    return {
        "method": method,
        "capacity": capacity,
        "bins": len(bins),
        "positions": positions,
        "padding_tokens": positions - tokens,
        "repeated_prompt_tokens": tokens - once,
        "prompt_copies": copies - sum(len(r) // r.group_size for r in rollouts),
        "wasted": round(1 - once / positions, 4),
        "fill": round(tokens / (len(bins) * capacity), 4),
        "plan_seconds": round(seconds / len(rollouts), 5),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="GSM8K's train.jsonl; random lengths without it")
    parser.add_argument("--model-dir", help="folder of the tokenizer, with --data")
    parser.add_argument("--prompts", type=int, default=64, help="of one rollout on one rank")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="random lengths, three rollouts")
    args = parser.parse_args()
    if args.data is not None and args.model_dir is None:
        raise SystemExit("--model-dir: got none, expected the folder of a tokenizer for --data")
    if args.quick:
        args.data, args.rollouts = None, 3
    return args


def main() -> None:
    args = parse()
    generator = torch.Generator().manual_seed(0)
    prompts, answers = random_lengths(args, generator) if args.data is None else lengths_of_data(args)
    prompts = prompts.repeat_interleave(args.group_size)
    responses = log_normal(answers.repeat_interleave(args.group_size).float(), 0.4, generator)
    rows = args.prompts * args.group_size
    pairs = zip(prompts.split(rows), responses.split(rows), strict=True)
    rollouts = [rollout_of(*pair, args.group_size) for pair in pairs]
    print(f"prompts {prompts.float().mean():.0f} tokens on average, responses {responses.float().mean():.0f}")
    print(f"{'capacity':>8} {'method':<14} {'bins':>5} {'positions':>10} {'wasted':>7} {'copies':>7} {'fill':>6}")
    cases = [measure(method, rollouts, capacity) for capacity in CAPACITIES for method in PLANS]
    for case in cases:
        counts = f"{case['capacity']:>8} {case['method']:<14} {case['bins']:>5} {case['positions']:>10}"
        print(f"{counts} {case['wasted']:>7.1%} {case['prompt_copies']:>7} {case['fill']:>6.1%}")
    print(json.dumps({"group_size": args.group_size, "rollouts": len(rollouts), "cases": cases}))


if __name__ == "__main__":
    main()

"""``python -m torchtune_grpo.demo``: the embedded default from nothing to above 90 %, through the real recipes.

SFT warm-up, GRPO, and an evaluation on held-out problems before, between and after, each launched with ``tune run``
from the root of the repository. Writes ``results.json`` and ``learning_curve.png`` into ``--output-dir``. A run that
was interrupted goes on where it stopped.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from torchtune_grpo import plot

STAGES = ("before SFT", "after SFT", "after GRPO")
COLUMNS = ("greedy pass@1", "avg@8", "pass@8", "format")
METRICS = ("eval/greedy/pass@1", "eval/sampled/avg@8", "eval/sampled/pass@8", "eval/greedy/reward/format")


def launch(recipe: str, config: str, ranks: int, *overrides: str) -> float:
    """Runs a recipe with ``tune run``; returns its wall-clock seconds. Its failure ends this program."""
    if not Path(f"recipes/{recipe}.py").is_file():
        sys.exit(
            f"error: got no recipes/{recipe}.py in {Path.cwd()}, expected to be launched from the repository's root"
        )
    tune = Path(sys.executable).with_name("tune")
    command = [str(tune), "run", "--nproc_per_node", str(ranks), f"recipes/{recipe}.py", "--config", config]
    print(f"\n$ tune {' '.join([*command[1:], *overrides])}", flush=True)
    start = time.monotonic()
    # The recipes set their threads themselves; the variable only keeps torchrun from warning about it.
    done = subprocess.run([*command, *overrides], env={"OMP_NUM_THREADS": "1", **os.environ})
    if done.returncode:
        sys.exit(done.returncode)
    return time.monotonic() - start


def evaluate(weights: str, folder: Path, seed: int, ranks: int) -> dict[str, float]:
    launch(
        "evaluate_distributed",
        "configs/tiny/evaluate.yaml",
        ranks,
        f"weights={weights}",
        f"output_dir={folder}",
        f"seed={seed}",
    )
    return json.loads((folder / "results.json").read_text())["metrics"]


def table(results: dict[str, dict[str, float]]) -> str:
    n = int(next(iter(results.values()))["eval/greedy/n"])
    lines = [
        f"Held-out problems, n = {n} (+- standard error)",
        f"{'':12}" + "".join(f"{c:>20}" for c in COLUMNS),
    ]
    for stage, metrics in results.items():
        cells = [
            f"{metrics[m]:.3f} +- {metrics[f'{m}_stderr']:.3f}" if f"{m}_stderr" in metrics else f"{metrics[m]:.3f}"
            for m in METRICS
        ]
        lines.append(f"{stage:12}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


def make_folder(folder: Path, parser: argparse.ArgumentParser) -> None:
    """Makes ``--output-dir``; ends the program where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output-dir: got {folder}, which cannot be written to: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    if args.ranks < 1:
        parser.error(f"--ranks: got {args.ranks}, expected at least 1")
    make_folder(args.output_dir, parser)
    out, start = args.output_dir, time.monotonic()
    sft, grpo = out / "sft_warmup", out / "grpo"
    common = f"seed={args.seed}"
    seconds: dict[str, float] = {}
    results = {STAGES[0]: evaluate("null", out / "eval_before_sft", args.seed, args.ranks)}
    seconds["sft_warmup"] = launch(
        "sft_warmup_distributed", "configs/tiny/sft_warmup.yaml", args.ranks, f"output_dir={sft}", common
    )
    results[STAGES[1]] = evaluate(str(sft), out / "eval_after_sft", args.seed, args.ranks)
    seconds["grpo"] = launch(
        "grpo_full_finetune_distributed",
        "configs/tiny/grpo.yaml",
        args.ranks,
        f"weights={sft}",
        f"output_dir={grpo}",
        common,
    )
    results[STAGES[2]] = evaluate(str(grpo), out / "eval_after_grpo", args.seed, args.ranks)
    seconds["total"] = time.monotonic() - start
    seconds = {name: round(value, 1) for name, value in seconds.items()}
    report = {"seed": args.seed, "ranks": args.ranks, "seconds": seconds, "results": results}
    (out / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    plot.main([str(grpo), "--out", str(out / "learning_curve.png")])
    print(f"\n{table(results)}\n\n{seconds['total']:.0f} s in all. {out}/results.json, {out}/learning_curve.png")


if __name__ == "__main__":
    main()

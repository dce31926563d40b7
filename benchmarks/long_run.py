"""A long GRPO run of a tiny model: do memory, open files, disk and speed stay what they are?

    python -m benchmarks.long_run --steps 4000
    python -m benchmarks.long_run --quick

Two ranks, with evaluations, samples, TensorBoard and a save in the background every 20 steps. Once a second each rank's
resident memory, open files and threads are read, and the bytes of the output folder's checkpoints. Slopes are fitted
to the second half of the run, in MiB a 1000 steps (memory grows for some 1500 steps first); ``speed`` is the steps a
second of its last quarter over those of its third. Linux only. The last line is JSON.
"""

import argparse
import json
import math
import os
import tempfile
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.forked_ranks import import_recipe, launch, output, small_grpo, wait
from torchtune_grpo.training.metrics import read_metrics

RECIPE = "grpo_full_finetune"
SLOPE_LIMIT = 1.0
"""MiB a 1000 steps that count as flat: 1 GiB in a million steps."""
CHANGES = {
    "model": {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 32, "intermediate_dim": 64},
    "dataset": {"size": 256},
    "prompts_per_step": 8,
    "generate": {"group_size": 4, "max_new_tokens": 16},
    "evaluation": {"heldout": {"dataset": {"size": 32}, "batch_size": 16, "generate": {"max_new_tokens": 16}}},
    "evaluate_every_n_steps": 50,
    "checkpoints": {"every_n_steps": 20, "keep_last": 2, "keep_best": 1, "asynchronous": True},
    "metric_loggers": [
        {
            "_component_": "torchtune.training.metric_logging.TensorBoardLogger",
            "log_dir": "${output_dir}/tensorboard",
        }
    ],
}


def look(processes: list[BaseProcess], run: Path) -> dict[str, Any]:
    """What every rank and the checkpoints hold now."""
    ranks = []
    for process in processes:
        status = Path(f"/proc/{process.pid}/status").read_text()
        of = dict(line.split(":", 1) for line in status.splitlines())
        ranks.append(
            {
                "mib": int(of["VmRSS"].split()[0]) / 1024,
                "threads": int(of["Threads"]),
                "files": len(list(Path(f"/proc/{process.pid}/fd").iterdir())),
            }
        )
    return {"time": time.time(), "ranks": ranks, "checkpoint_bytes": _bytes(run / "checkpoints")}


def _bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # which passes over what is pruned meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def watch(config: Path, run: Path) -> list[dict[str, Any]]:
    """Runs the recipe to its end; a look a second. Raises RuntimeError where a rank fails."""
    processes, looks = launch(RECIPE, config), []
    while wait(processes, 0.5) == [None, None]:
        try:
            looks.append(look(processes, run))
        except (FileNotFoundError, ProcessLookupError, KeyError):  # a rank has just ended
            break
        time.sleep(0.5)
    codes = wait(processes, 60)
    if codes != [0, 0]:
        raise RuntimeError(f"the ranks ended with {codes}:\n{output(config)[-3000:]}")
    return looks


def slope(x: list[float], y: list[float]) -> float:
    """Of the least-squares line; NaN for fewer than two points."""
    if len(x) < 2:
        return math.nan
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def summarize(looks: list[dict[str, Any]], run: Path, steps: int) -> dict[str, Any]:
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "reward" in line]
    at = {line["step"]: line["time_s"] for line in lines}
    quarters = [at[1], *(at[steps * k // 4] for k in range(1, 5))]
    rates = [steps / 4 / (b - a) for a, b in zip(quarters[:-1], quarters[1:], strict=True)]
    end = looks[-1]["time"]
    span = at[steps] - at[1]
    late = [entry for entry in looks if entry["time"] > end - 0.5 * span]
    step_of = [(1 - (end - entry["time"]) / span) * steps / 1000 for entry in late]
    ranks = [[entry["ranks"][rank] for entry in late] for rank in range(2)]
    slopes = [slope(step_of, [entry["mib"] for entry in entries]) for entries in ranks]
    return {
        "steps": steps,
        "seconds": round(span, 1),
        "mib_by_tenth": [[round(looks[i * len(looks) // 10]["ranks"][r]["mib"]) for i in range(10)] for r in range(2)],
        "mib_per_1000_steps": [round(value, 3) for value in slopes],
        "files": [[min(e["files"] for e in entries), max(e["files"] for e in entries)] for entries in ranks],
        "threads": [[min(e["threads"] for e in entries), max(e["threads"] for e in entries)] for entries in ranks],
        "checkpoint_mib": [round(f(e["checkpoint_bytes"] for e in late) / 2**20, 2) for f in (min, max)],
        "steps_per_second": [round(rate, 2) for rate in rates],
        "speed": round(rates[3] / rates[2], 3),
        "flat": max(slopes) < SLOPE_LIMIT,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--quick", action="store_true", help="100 steps")
    args = parser.parse_args()
    steps = 100 if args.quick else args.steps
    import_recipe(RECIPE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        looks = watch(small_grpo(folder, steps, CHANGES), folder / "run")
        print(json.dumps(summarize(looks, folder / "run", steps)))


if __name__ == "__main__":
    main()

"""``python -m torchtune_grpo.demo_opd``: a student learns from two teachers, each at home in one half of the problems.

SFT and GRPO make each teacher on its half of the operations; SFT on solutions that belong to other problems makes a
student that knows only the format; distillation with each source routed to its teacher makes it nearly as good as
both; the same with the routing swapped must fail. All are the real recipes, launched with ``tune run`` from the root of
the repository; a stage whose last checkpoint is on disk is not run again, and what does not wait for anything else runs
side by side, one core each. Writes ``results.json`` and ``learning_curve.png`` into ``--output-dir``.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from torchtune_grpo import plot
from torchtune_grpo.demo import launch, make_folder
from torchtune_grpo.training.checkpoint_files import newest_checkpoint, read_state
from torchtune_grpo.training.metrics import read_metrics

SOURCES = ("growth", "decline")
SUCCESS_SHARE = 0.9
"""Each half of the student must reach this share of its teacher's success; with the routing swapped neither may."""

SFT = {"total_steps": 200, "max_tokens": 72, "log_every_n_steps": 50, "evaluate_every_n_steps": 999}
GRPO = {"total_steps": 8, "max_prompt_tokens": 40, "generate": {"max_new_tokens": 32}, "log_samples_every_n_steps": 99}
STUDENT = SFT | {"total_steps": 100}
BASELINE = GRPO | {"total_steps": 100, "evaluate_every_n_steps": 20}


class Demo:
    """The stages of one seed, each a recipe on a config made from ``configs/tiny``."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.seed = out, seed
        self.seconds: dict[str, float] = {}
        self.distillation = OmegaConf.load("configs/tiny/opd.yaml")
        self.parts = {part.source: part for part in self.distillation.dataset.datasets}

    def stage(self, name: str, recipe: str, base: str, changes: dict[str, Any], ranks: int = 1) -> Path:
        """Runs a recipe into ``<out>/<name>`` unless its last checkpoint is there."""
        folder = self.out / name
        cfg = OmegaConf.load(f"configs/tiny/{base}.yaml")
        for key in {"dataset", "evaluation"} & changes.keys():  # replaced whole, not merged key by key
            del cfg[key]
        checkpoints = {"every_n_steps": 50, "keep_last": 1, "keep_best": 0}
        common = {"seed": self.seed, "output_dir": str(folder), "checkpoints": checkpoints, "num_threads": 1}
        cfg = OmegaConf.merge(cfg, common, changes)
        newest = newest_checkpoint(folder / "checkpoints")
        path = self.out / "configs" / f"{name}.yaml"
        if path.exists() and OmegaConf.load(path) != cfg:
            sys.exit(
                f"error: --output-dir: got {self.out}, which holds another demo ({path} differs); take another one"
            )
        if newest is None or read_state(newest)["step"] < cfg.total_steps:
            path.parent.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(cfg, path)
            self.seconds[name] = launch(recipe, str(path), ranks)
        return folder

    def problems(self, sources: Sequence[str], **changes: Any) -> dict[str, Any]:
        """Problems of some sources in equal parts, and the held-out problems of both."""
        parts = [self.parts[source] | changes for source in sources]
        mixed = {"_component_": "torchtune_grpo.data.mixed_dataset", "weights": [1.0] * len(parts), "datasets": parts}
        return {"dataset": mixed, "evaluation": self.distillation.evaluation}

    def sft(self, name: str, sources: Sequence[str], changes: dict[str, Any], ranks: int = 1, **data: Any) -> Path:
        size = 64 * changes["total_steps"] // len(sources)
        changes = changes | self.problems(sources, split="sft", size=size, **data)
        return self.stage(name, "sft_warmup_distributed", "sft_warmup", changes, ranks)

    def grpo(self, name: str, weights: Path, sources: Sequence[str], changes: dict[str, Any], ranks: int = 1) -> Path:
        changes = changes | self.problems(sources) | {"weights": str(weights)}
        return self.stage(name, "grpo_full_finetune_distributed", "grpo", changes, ranks)

    def teacher(self, source: str) -> Path:
        return self.grpo(f"teacher_{source}", self.sft(f"teacher_{source}_sft", [source], SFT), [source], GRPO)

    def distil(self, name: str, student: Path, teachers: dict[str, Path], routing: dict[str, str]) -> Path:
        changes = {
            "weights": str(student),
            "teachers": {source: {"weights": str(folder)} for source, folder in teachers.items()},
            "routing": {"sources": routing},
        }
        return self.stage(name, "opd_full_finetune_distributed", "opd", changes)

    def run(self, *, baseline: bool) -> tuple[dict[str, Path], dict[str, Path]]:
        """Teachers by source, and the runs that start from the student."""
        teachers = dict(zip(SOURCES, together([partial(self.teacher, source) for source in SOURCES]), strict=True))
        student = self.sft("student", SOURCES, STUDENT, ranks=2, format_only=True)
        routings = {"routed": SOURCES, "swapped": tuple(reversed(SOURCES))}
        folders = together(
            [
                partial(self.distil, name, student, teachers, dict(zip(SOURCES, aliases, strict=True)))
                for name, aliases in routings.items()
            ]
        )
        runs = dict(zip(routings, folders, strict=True))
        if baseline:
            runs["grpo"] = self.grpo("grpo", student, SOURCES, BASELINE, ranks=2)
        return teachers, runs


def together(jobs: Sequence[Callable[[], Path]]) -> list[Path]:
    """Runs jobs side by side; the first failure ends the program when the others are done."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def successes(run: Path) -> list[dict[str, Any]]:
    """Every evaluation of a run: its step, its seconds and the success of each source."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "eval/heldout/pass@1" in line]
    return [
        {"step": line["step"], "seconds": line["time_s"]} | {s: line[f"eval/heldout/{s}/pass@1"] for s in SOURCES}
        for line in lines
    ]


def steps_to(curve: list[dict[str, Any]], goals: dict[str, float]) -> int | None:
    """The first evaluated step at which every source has reached its goal, None if there is none."""
    return next((point["step"] for point in curve if all(point[s] >= goals[s] for s in SOURCES)), None)


def summarize(demo: Demo, teachers: dict[str, Path], runs: dict[str, Path]) -> dict[str, Any]:
    """What was reached, and whether it is what was promised."""
    curves = {name: successes(run) for name, run in runs.items()}
    of_teachers = {source: successes(folder)[-1] for source, folder in teachers.items()}
    goals = {source: SUCCESS_SHARE * of_teachers[source][source] for source in SOURCES}
    first = read_metrics(runs["routed"] / "metrics.jsonl")[0]
    return {
        "seed": demo.seed,
        "n_per_source": {source: int(first[f"eval/heldout/{source}/n"]) for source in SOURCES},
        "teachers": of_teachers,
        "student": {"before": curves["routed"][0], **{name: curve[-1] for name, curve in curves.items()}},
        "steps_to_goal": {name: steps_to(curve, goals) for name, curve in curves.items()},
        "routed_reaches_both_goals": all(curves["routed"][-1][s] >= goals[s] for s in SOURCES),
        "swapped_reaches_neither": all(curves["swapped"][-1][s] < goals[s] for s in SOURCES),
        "seconds": {name: round(value, 1) for name, value in demo.seconds.items()},
        "curves": curves,
    }


def table(report: dict[str, Any]) -> str:
    rows = {f"teacher of {source}": report["teachers"][source] for source in SOURCES}
    rows |= {f"student, {name}": values for name, values in report["student"].items()}
    lines = [
        f"Held-out greedy success, n = {report['n_per_source']}",
        f"{'':22}" + "".join(f"{source:>10}" for source in SOURCES),
        *(f"{name:22}" + "".join(f"{values[source]:>10.3f}" for source in SOURCES) for name, values in rows.items()),
        f"Steps to {SUCCESS_SHARE} of both teachers: {report['steps_to_goal']}",
        f"Both halves reach it: {report['routed_reaches_both_goals']}; with the routing swapped neither does: "
        f"{report['swapped_reaches_neither']}",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("runs/demo_opd"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--baseline", action="store_true", help="also GRPO from the student's start, for comparison")
    args = parser.parse_args()
    make_folder(args.output_dir, parser)
    start, demo = time.monotonic(), Demo(args.output_dir, args.seed)
    teachers, runs = demo.run(baseline=args.baseline)
    report = summarize(demo, teachers, runs)
    report["seconds"]["total"] = round(time.monotonic() - start, 1)
    (args.output_dir / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    plot.main([*map(str, runs.values()), "--out", str(args.output_dir / "learning_curve.png")])
    seconds = report["seconds"]["total"]
    print(f"\n{table(report)}\n\n{seconds:.0f} s in all. {args.output_dir}/results.json and learning_curve.png")
    if not (report["routed_reaches_both_goals"] and report["swapped_reaches_neither"]):
        sys.exit("error: this seed did not do what the demo promises")


if __name__ == "__main__":
    main()

"""Runs a recipe undisturbed, then takes it up from several of its checkpoints, and says what came out differently.

    python -m tests.recipes.resume_everywhere PLAN.json

The plan is a list of cases: recipe, config (a checkpoint at every step), steps to resume from, ranks that run
(``ranks``) and that resume (``resuming``). The last line of output is a JSON list: of each case, its differences.
"""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.forked_ranks import import_recipe, outcome, run


def differences(case: dict[str, Any]) -> list[str]:
    """Everything at the same number of ranks, bit for bit; at another one the next training line, to rounding."""
    config, ranks, resuming = Path(case["config"]), case["ranks"], case["resuming"]
    whole = Path(OmegaConf.load(config).output_dir)
    run(case["recipe"], config, ranks=ranks)
    expected, found = outcome(whole), []
    for step in case["steps"]:
        folder = whole.with_name(f"from_{step}")
        shutil.copytree(whole, folder)
        for path in folder.glob("checkpoints/step_*"):
            if int(path.name.removeprefix("step_")) > step:
                shutil.rmtree(path)
        run(case["recipe"], config, f"output_dir={folder}", ranks=resuming)
        got = outcome(folder)
        if ranks == resuming:
            found += [f"step {step}: {key}" for key in expected if got[key] != expected[key]]
        else:
            found += [f"step {step}: {problem}" for problem in unlike(got["metrics"], expected["metrics"], step)]
    return found


def unlike(got: list[dict[str, Any]], expected: list[dict[str, Any]], step: int) -> list[str]:
    """Where the first training line after ``step`` differs by more than rounding."""
    a, b = (next(line for line in lines if line["step"] > step and "loss" in line) for lines in (got, expected))
    if a.keys() != b.keys():
        return [f"names {sorted(a.keys() ^ b.keys())}"]
    return [f"{k}: {a[k]} and {b[k]}" for k in a if not math.isclose(a[k], b[k], rel_tol=1e-3, abs_tol=1e-5)]


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    for recipe in {case["recipe"] for case in cases}:
        import_recipe(recipe)
    print(json.dumps([differences(case) for case in cases]))

"""Ranks of a recipe as processes of their own, forked after the imports: a start then takes a second, not eight.

For processes that have started no threads and no process group. Signals and exit codes are direct, as under srun.
"""

import multiprocessing
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from torchtune_grpo.training.metrics import read_metrics

ROOT = Path(__file__).parents[1]
FORK = multiprocessing.get_context("fork")
CLOCKS = ("time_s", "seconds/", "tokens_per_second/", "peak_memory_gib")


def small_grpo(folder: Path, steps: int, changes: dict[str, Any]) -> Path:
    """The config of a GRPO run into ``<folder>/run``: ``configs/tiny`` with ``changes``, from random weights.

    Untrained completions are never right; rewarded for their lengths, which differ, they give the groups a spread.
    """
    length = {
        "_component_": "torchtune_grpo.rewards.LengthPenalty",
        "max_response_tokens": "${generate.max_new_tokens}",
    }
    rewards = {"weights": {"length": 1.0}, "fns": {"length": length}}
    of_run = {"output_dir": str(folder / "run"), "total_steps": steps, "weights": None, "rewards": rewards}
    folder.mkdir(exist_ok=True)
    OmegaConf.save(
        OmegaConf.merge(OmegaConf.load(ROOT / "configs/tiny/grpo.yaml"), of_run, changes), folder / "config.yaml"
    )
    return folder / "config.yaml"


def import_recipe(name: str) -> None:
    """Imports what ``recipes/<name>_distributed.py`` needs, from the repository's root; call it before ``launch``."""
    torch.set_num_threads(1)  # a forked process inherits no threads
    os.chdir(ROOT)
    runpy.run_path(_path(name), run_name="imported")


def launch(
    recipe: str, config: Path, *overrides: str, ranks: int = 2, in_rank_0: Callable[[], None] = lambda: None
) -> list[BaseProcess]:
    """Starts a recipe; ``in_rank_0`` is called there first. Output is appended to a file beside ``config``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        arguments = [_path(recipe), "--config", str(config), *overrides]
        before = in_rank_0 if rank == 0 else None
        processes.append(FORK.Process(target=_run, args=(place, arguments, config.with_suffix(".log"), before)))
        processes[-1].start()
    return processes


def wait(processes: list[BaseProcess], seconds: float) -> list[int | None]:
    """Exit codes after at most ``seconds``; None for a rank that is still there."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    return [process.exitcode for process in processes]


def run(recipe: str, config: Path, *overrides: str, ranks: int = 2) -> None:
    """Runs a recipe to its end. Raises RuntimeError, with what it said, unless every rank ends with 0."""
    codes = wait(launch(recipe, config, *overrides, ranks=ranks), 120)
    if codes != [0] * ranks:
        raise RuntimeError(f"the ranks ended with {codes}:\n{output(config)[-5000:]}")


def output(config: Path) -> str:
    """All that the runs of this config have said."""
    return config.with_suffix(".log").read_text()


def outcome(folder: Path) -> dict[str, Any]:
    """All that the run of this output_dir left behind, clocks aside."""
    *_, last = checkpoints = sorted(folder.glob("checkpoints/step_*"))
    return {
        "metrics": without_clocks(folder),
        "samples": (folder / "samples.jsonl").read_text(),
        "last checkpoint": last.name,  # a signal's checkpoint may have taken another's place
        "half or damaged checkpoints": sorted(path.name for path in set(folder.glob("checkpoints/*")) - {*checkpoints}),
        "weights": (last / "hf/model.safetensors").read_bytes(),
    }


def without_clocks(folder: Path) -> list[dict[str, Any]]:
    """A run's metric lines less what a clock or the memory's state measured."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(CLOCKS)} for line in lines]


def _path(recipe: str) -> str:
    return str(ROOT / f"recipes/{recipe}_distributed.py")


def _run(place: dict[str, int], arguments: list[str], log: Path, before: Callable[[], None] | None) -> None:
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = arguments
    if before is not None:
        before()
    runpy.run_path(arguments[0], run_name="__main__")

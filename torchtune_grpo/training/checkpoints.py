"""Checkpoints from which a run continues bit for bit, and from which other tools load the weights.

``<output_dir>/checkpoints/step_00000010/`` holds ``train/`` (torch DCP: weights, optimizer, scheduler;
loadable at any number of ranks), ``rng/rank_<r>.pt`` (random state of every rank), ``state.json`` (step,
counters, data position, metrics, config, versions) and ``hf/`` (the exported Hugging Face folder). It is
written under a hidden name and renamed when all of it is on disk, so a folder named ``step_*`` is complete,
and a kill or a full disk costs no earlier checkpoint. With several nodes the folder must be on a file system
that all of them see.
"""

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtune_grpo.collectives import RankError, all_gather_objects, rank, shared_errors, world_size
from torchtune_grpo.config import ConfigError

_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class CheckpointManager:
    """Saves every ``every_n_steps`` optimizer steps; keeps the last ``keep_last`` and the ``keep_best`` best.

    Best means the highest ``best_metric`` among the metrics given to ``save``; of equals, the newest.
    """

    output_dir: str
    every_n_steps: int
    keep_last: int = 2
    keep_best: int = 0
    best_metric: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("every_n_steps", 1), ("keep_last", 1), ("keep_best", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected at least {least}")
        if self.keep_best and self.best_metric is None:
            raise ConfigError(f"best_metric: got null, expected a metric's name, as keep_best is {self.keep_best}")

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / "checkpoints"

    def is_due(self, step: int) -> bool:
        return step % self.every_n_steps == 0

    def start(self, resume: str | None) -> Path | None:
        """The checkpoint to continue from, None for a fresh run; clears away what a killed save left behind.

        ``resume``: "auto" takes the newest checkpoint of ``output_dir`` if there is one; a path takes that
        one; None starts afresh. Collective: one broadcast of the rank-0 decision and its error, if any.

        Raises:
            ConfigError: no such checkpoint, or the run would write among checkpoints that it does not
            continue.
        """
        answer: list[Any] = [None, None]
        if rank() == 0:
            try:
                answer[0] = self._resume_path(resume)
                for leftover in self.folder.glob(".step_*"):
                    shutil.rmtree(leftover)
            except ConfigError as error:
                answer[1] = str(error)
        if dist.is_initialized():
            dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise ConfigError(answer[1])
        return answer[0]

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        extra: Mapping[str, Any],
        metrics: Mapping[str, float],
        config: Mapping[str, Any],
        export: Callable[[Path], None],
    ) -> Path:
        """Writes the checkpoint of ``step`` and prunes older ones; a step saved already is left as it is.

        ``extra`` and ``config`` are JSON values, rank 0's are written. ``export(folder)`` is called on every
        rank and writes the Hugging Face folder; it must not fail on one rank while others wait in a
        collective of its own. Collective: DCP's, the export's, and one all-gather of error messages a stage.

        Raises:
            RankError: on every rank if any failed; earlier checkpoints are untouched.
        """
        final = self.folder / f"step_{step:08d}"
        partial = self.folder / f".{final.name}.tmp"
        if all_gather_objects((final / "state.json").is_file())[0]:  # rank 0 decides: network file systems may disagree
            return final
        try:
            with shared_errors(f"checkpoint of step {step}, making its folder"):
                if rank() == 0:
                    for folder in (partial, final):  # a step_* folder without state.json is no checkpoint
                        shutil.rmtree(folder, ignore_errors=True)
                    (partial / "rng").mkdir(parents=True)
            with shared_errors(f"checkpoint of step {step}, train state"):
                dcp.save(_train_state(model, optimizer, scheduler), checkpoint_id=partial / "train")
                torch.save(_rng_state(), partial / "rng" / f"rank_{rank()}.pt")
            with shared_errors(f"checkpoint of step {step}, export"):
                export(partial / "hf")
            with shared_errors(f"checkpoint of step {step}, completing it"):
                if rank() == 0:
                    state = _state(step, extra=extra, metrics=metrics, config=config)
                    (partial / "state.json").write_text(json.dumps(state, indent=2))
                    _complete(partial, final)
                    self._prune()
        except RankError:
            if rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return final

    def load(
        self, path: Path, *, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> tuple[int, dict[str, Any]]:
        """Restores everything in place and returns the step and ``extra``. Collective: DCP's.

        The random state is restored only at the number of ranks that saved it; at another one the run
        continues from the ranks' own seeds, and is not the run that it would have been.
        """
        with shared_errors(f"resume: loading {path}"):
            state = read_state(path)
            train = _train_state(model, optimizer, scheduler)
            dcp.load(train, checkpoint_id=path / "train")
            set_state_dict(model, optimizer, model_state_dict=train["model"], optim_state_dict=train["optimizer"])
            if scheduler is not None:
                scheduler.load_state_dict(train["scheduler"])
            if state["world_size"] == world_size():
                _set_rng_state(torch.load(path / "rng" / f"rank_{rank()}.pt"))
        return state["step"], state["extra"]

    def _resume_path(self, resume: str | None) -> Path | None:
        newest = newest_checkpoint(self.folder)
        if resume == "auto":
            return newest
        path = None if resume is None else Path(resume)
        if path is not None and not (path / "state.json").is_file():
            raise ConfigError(f"resume: got {resume!r}, expected 'auto', null or a checkpoint folder step_*")
        if newest is not None and (path is None or path.resolve() != newest.resolve()):
            given = "null" if resume is None else repr(resume)
            raise ConfigError(
                f"resume: got {given}, but output_dir already holds {newest}, which this run would mix "
                "with its own; set resume=auto to continue from it, or another output_dir"
            )
        return path

    def _prune(self) -> None:
        paths = _checkpoints(self.folder)
        kept = set(paths[-self.keep_last :])
        if self.keep_best:
            scores = {path: read_state(path)["metrics"].get(self.best_metric) for path in paths}
            ranked = [path for path in paths if scores[path] is not None and not isnan(scores[path])]
            kept.update(sorted(ranked, key=scores.get)[-self.keep_best :])
        for path in set(paths) - kept:
            hidden = path.rename(path.with_name(f".{path.name}.tmp"))  # a kill leaves no half a step_* folder
            shutil.rmtree(hidden)


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in a ``checkpoints`` folder, None where there is none."""
    return next(reversed(_checkpoints(folder)), None)


def resolve_weights(path: str, *, key: str = "weights") -> Path:
    """The Hugging Face folder meant by ``path``: itself, a checkpoint's, or the newest of a run's output_dir.

    Raises:
        ConfigError: ``path`` is none of these; ``key`` is the config key that it names.
    """
    given = Path(path)
    newest = newest_checkpoint(given / "checkpoints")
    for folder in (given, given / "hf", *([newest / "hf"] if newest else [])):
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return folder
    found = ", ".join(sorted(child.name for child in given.iterdir())[:10]) if given.is_dir() else ""
    problem = f"a folder with {found or 'nothing in it'}" if given.is_dir() else "no folder"
    raise ConfigError(
        f"{key}: got {path!r}, which is {problem}; expected a folder with config.json and *.safetensors, "
        "a checkpoint folder step_*, or the output_dir of a run with a checkpoint"
    )


def _checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(
        (path for path in found if (path / "state.json").is_file()),
        key=lambda p: int(p.name.removeprefix("step_")),
    )


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's ``state.json``: step, extra, metrics, config, versions, world size."""
    return json.loads((path / "state.json").read_text())


def _train_state(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    return state if scheduler is None else state | {"scheduler": scheduler.state_dict()}


def _state(step: int, **values: Mapping[str, Any]) -> dict[str, Any]:
    versions = {name: version(name) for name in ("torch", "torchtune")}
    return {"step": step, "world_size": world_size(), "versions": versions, **values}


def _rng_state() -> dict[str, Any]:
    """Python's, NumPy's and torch's global generators, the current CUDA device's included."""
    name, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def _set_rng_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def _complete(partial: Path, final: Path) -> None:
    """Makes the folder durable, then visible: after the rename nothing of it can be missing."""
    for path in (*partial.rglob("*"), partial):
        _fsync(path)
    partial.rename(final)
    _fsync(final.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

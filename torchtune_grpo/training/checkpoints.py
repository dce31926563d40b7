"""Checkpoints from which a run continues bit for bit, and from which other tools load the weights.

``<output_dir>/checkpoints/step_00000010/`` holds ``train/`` (torch DCP: weights, optimizer, scheduler; loadable at any
number of ranks), ``ranks/rank_<r>.pt`` (each rank's random state, open sums of metrics, rollout in use), ``state.json``
(step, counters, data position, config, versions), ``hf/`` (the exported Hugging Face folder), ``metrics.json`` (its
evaluation, if any) and ``manifest.json`` (checksums). It is written under a hidden name and renamed when all of it is
on disk: one named ``step_*`` is complete, and a kill or a full disk costs no earlier one. Nodes must share the folder.
"""

import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from math import isnan
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtune_grpo.collectives import RankError, all_gather_objects, rank, shared_errors, world_size
from torchtune_grpo.config import ConfigError
from torchtune_grpo.training.checkpoint_files import (
    MANIFEST,
    METRICS,
    by_step,
    complete,
    complete_checkpoints,
    find_damage,
    newest_checkpoint,
    own_files,
    read_metrics_of,
    read_state,
    write_durably,
)
from torchtune_grpo.training.progress import say
from torchtune_grpo.training.random_state import random_state, set_random_state


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a run continues from.

    ``extra``: JSON values of rank 0. ``local``: what each rank kept for itself; this rank's alone where as many ranks
    resume as saved (``same_ranks``), else that of all, in rank order. A fresh run has step 0 and nothing else.
    """

    step: int = 0
    extra: Mapping[str, Any]
    local: Sequence[Mapping[str, Any]]
    same_ranks: bool = True


@dataclass(frozen=True)
class _Snapshot:
    """All that a checkpoint is made of; ``device``: the index of this rank's GPU, if any."""

    step: int
    train: Mapping[str, Any]
    local: Mapping[str, Any]
    state: str
    metrics: Mapping[str, float]
    write_export: Callable[[Path], None]
    device: int | None


@dataclass(kw_only=True)
class CheckpointManager:
    """Saves every ``every_n_steps`` optimizer steps; keeps the last ``keep_last`` and the ``keep_best`` best.

    Best means the highest ``best_metric`` among the metrics given to ``save``; of equals, the newest. With
    ``asynchronous`` a save only copies the state to CPU memory (weights and optimizer of this rank, on rank 0 also the
    whole weights) and writes it in a thread while training goes on; without, it writes before training goes on.
    """

    output_dir: str
    every_n_steps: int
    keep_last: int = 2
    keep_best: int = 0
    best_metric: str | None = None
    asynchronous: bool = True

    def __post_init__(self) -> None:
        for name, least in (("every_n_steps", 1), ("keep_last", 1), ("keep_best", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected at least {least}")
        if self.keep_best and self.best_metric is None:
            raise ConfigError(f"best_metric: got null, expected a metric's name, as keep_best is {self.keep_best}")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / "checkpoints"

    def start(self, resume: str | None) -> Path | None:
        """The checkpoint to continue from, None for a fresh run; clears away what a killed save left behind.

        ``resume``: "auto" takes the newest checkpoint of ``output_dir`` that is not damaged, if there is any; those
        passed over are named in a warning and renamed ``damaged_step_*``. A path takes that one; None starts afresh.
        Collective: one gather of the rank-0 decision, one for each checkpoint that is verified.

        Raises:
            ConfigError: no such checkpoint, none without damage, or the run would write among checkpoints that it does
            not continue.
        """
        answer: list[Any] = [[], None]
        if rank() == 0:
            try:
                answer[0] = self._candidates(resume)
                for leftover in self.folder.glob(".step_*"):
                    shutil.rmtree(leftover, ignore_errors=True)  # a rank of a killed run may still be writing
            except ConfigError as error:
                answer[1] = str(error)
        candidates, error = all_gather_objects(answer)[0]
        if error is not None:
            raise ConfigError(error)
        damaged: dict[Path, str] = {}
        for path in candidates:
            damage = find_damage(path)
            if damage is None:
                break
            damaged[path] = damage
        if len(damaged) == len(candidates) > 0:
            found = "\n".join(f"{path} is damaged: {damage}" for path, damage in damaged.items())
            raise ConfigError(f"resume: got {resume!r}, expected a checkpoint without damage\n{found}")
        if rank() == 0:
            for path, damage in damaged.items():
                aside = path.rename(path.with_name(f"damaged_{path.name}_{time.time_ns()}"))
                warnings.warn(f"{path} is damaged and passed over, see {aside}: {damage}", stacklevel=2)
        return candidates[len(damaged)] if candidates else None

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        extra: Mapping[str, Any],
        local: Mapping[str, Any],
        metrics: Mapping[str, float],
        config: Mapping[str, Any],
        export: Callable[[], Callable[[Path], None]],
    ) -> Path:
        """Saves the checkpoint of ``step`` and prunes older ones; of a step saved already only ``metrics`` change.

        ``extra`` and ``config`` are JSON values, rank 0's are written; ``local``: tensors and plain values of each
        rank. ``export()`` is called on every rank and takes a copy of the weights; what it returns writes the Hugging
        Face folder, and must not fail on one rank while others wait in a collective of its own. An asynchronous save
        is complete, and its error known, at the next ``save`` or ``wait``. Collective: DCP's, the export's, and one
        all-gather a stage, in a process group of its own.

        Raises:
            RankError: on every rank if any failed, also in the save before; earlier checkpoints are untouched.
        """
        self.wait()
        final = self.folder / f"step_{step:08d}"
        if all_gather_objects((final / "state.json").is_file())[0]:  # rank 0 decides: network file systems may disagree
            with shared_errors(f"checkpoint of step {step}, its metrics"):
                if rank() == 0 and metrics:
                    write_durably(final / METRICS, json.dumps(dict(metrics)))
            return final
        if dist.is_initialized() and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(hours=2))  # the slowest writer's
        with shared_errors(f"checkpoint of step {step}, copying the state"):  # memory may run out on one rank
            train = _train_state(model, optimizer, scheduler)
            train = _copy(train) if self.asynchronous else train
            kept = {"random": random_state(), **local}
            versions = {name: version(name) for name in ("torch", "torchtune")}
            state = {"step": step, "world_size": world_size(), "versions": versions, "extra": extra, "config": config}
            text = json.dumps(state, indent=2)
        with shared_errors(f"checkpoint of step {step}, copying the weights"):
            write_export = export()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        snapshot = _Snapshot(step, train, kept, text, metrics, write_export, device)
        if self.asynchronous:
            self._pending = self._thread.submit(self._write, snapshot)
        else:
            self._write(snapshot)
        return final

    def wait(self) -> None:
        """Returns when no save is under way. Raises RankError if the last one failed, on every rank."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, snapshot: _Snapshot) -> None:
        final = self.folder / f"step_{snapshot.step:08d}"
        partial = self.folder / f".{final.name}.tmp"

        if snapshot.device is not None:
            torch.cuda.set_device(snapshot.device)  # DCP asks for a stream of the thread's device

        def stage(name: str) -> Any:
            return shared_errors(f"checkpoint of step {snapshot.step}, {name}", self._group)

        try:
            with stage("making its folder"):
                if rank() == 0:
                    for folder in (partial, final):  # a step_* folder without state.json is no checkpoint
                        shutil.rmtree(folder, ignore_errors=True)
                    (partial / "ranks").mkdir(parents=True)
            with stage("train state"):
                dcp.save(dict(snapshot.train), checkpoint_id=partial / "train", process_group=self._group)
                torch.save(dict(snapshot.local), partial / "ranks" / f"rank_{rank()}.pt")
            with stage("export"):
                snapshot.write_export(partial / "hf")
            with stage("checksums"):
                if rank() == 0:
                    (partial / "state.json").write_text(snapshot.state)
                files = own_files(partial)
            manifest = {name: entry for part in all_gather_objects(files, self._group) for name, entry in part.items()}
            with stage("completing it"):
                if rank() == 0:
                    (partial / METRICS).write_text(json.dumps(dict(snapshot.metrics)))
                    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
                    complete(partial, final)
                    self._prune()
                    say(f"step {snapshot.step} | checkpoint {final}")
        except RankError:
            if rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def load(self, path: Path, *, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None) -> Resumed:
        """Restores model, optimizer and scheduler in place and returns the rest. Collective: DCP's.

        The random state is restored only at the number of ranks that saved it; at another one the run continues from
        the ranks' own seeds.
        """
        with shared_errors(f"resume: loading {path}"):
            state = read_state(path)
            train = _train_state(model, optimizer, scheduler)
            dcp.load(train, checkpoint_id=path / "train")
            set_state_dict(model, optimizer, model_state_dict=train["model"], optim_state_dict=train["optimizer"])
            if scheduler is not None:
                scheduler.load_state_dict(train["scheduler"])
            same_ranks = state["world_size"] == world_size()
            ranks = [rank()] if same_ranks else range(state["world_size"])
            local = [torch.load(path / "ranks" / f"rank_{r}.pt", map_location="cpu") for r in ranks]
            if same_ranks:
                set_random_state(local[0]["random"])
        return Resumed(step=state["step"], extra=state["extra"], local=local, same_ranks=same_ranks)

    def _candidates(self, resume: str | None) -> list[Path]:
        """The checkpoints that ``resume`` allows, best first; damaged ones among them."""
        if resume == "auto":
            return list(reversed(by_step(self.folder)))
        newest = newest_checkpoint(self.folder)
        path = None if resume is None else Path(resume)
        if path is not None and not os.path.isfile(path / "state.json"):
            raise ConfigError(f"resume: got {resume!r}, expected 'auto', null or a checkpoint folder step_*")
        if newest is not None and (path is None or path.resolve() != newest.resolve()):
            given = "null" if resume is None else repr(resume)
            raise ConfigError(
                f"resume: got {given}, but output_dir already holds {newest}, which this run would mix "
                "with its own; set resume=auto to continue from it, or another output_dir"
            )
        return [] if path is None else [path]

    def _prune(self) -> None:
        paths = complete_checkpoints(self.folder)
        kept = set(paths[-self.keep_last :])
        if self.keep_best:
            scores = {path: read_metrics_of(path).get(self.best_metric) for path in paths}
            ranked = [path for path in paths if scores[path] is not None and not isnan(scores[path])]
            kept.update(sorted(ranked, key=scores.get)[-self.keep_best :])
        for path in set(paths) - kept:
            hidden = path.rename(path.with_name(f".{path.name}.tmp"))  # a kill leaves no half a step_* folder
            shutil.rmtree(hidden, ignore_errors=True)  # the next start clears what is left


def _train_state(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    return state if scheduler is None else state | {"scheduler": scheduler.state_dict()}


def _copy(value: Any) -> Any:
    """A copy in CPU memory of tensors at any depth of dicts and lists."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value

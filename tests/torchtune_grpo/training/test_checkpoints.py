import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import ProcessExitedException

from tests.torchtune_grpo.distributed_helpers import run_ranks
from torchtune_grpo.collectives import RankError
from torchtune_grpo.config import ConfigError
from torchtune_grpo.training import checkpoints
from torchtune_grpo.training.checkpoints import CheckpointManager, newest_checkpoint, resolve_weights


class TiedModel(nn.Module):
    """Embedding and head share one weight; 7 rows, so that two ranks hold unequal shards."""

    def __init__(self, dim: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, dim)
        self.inner = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(tokens))))


class Training(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None

    def run(self, steps: int) -> list[float]:
        """Steps on tokens of torch's generator; returns losses, draws of the other generators, and rates."""
        seen = []
        for _ in range(steps):
            tokens = torch.randint(0, 7, (4, 5))
            loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            seen += [loss.item(), random.random(), np.random.random(), self.optimizer.param_groups[0]["lr"]]
        return seen

    def tensors(self) -> dict[str, Tensor]:
        """Full parameters and both Adam moments."""
        found = {}
        for name, parameter in self.model.named_parameters():
            moments = self.optimizer.state.get(parameter, {})
            for kind, value in {"parameter": parameter, **moments}.items():
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                found[f"{name}/{kind}"] = value.detach().clone()
        return found


def make_training(seed: int, *, dim: int = 3, shard: bool = True) -> Training:
    torch.manual_seed(seed)
    model = TiedModel(dim)
    if shard:
        fully_shard(model.inner)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return Training(model, optimizer, scheduler)


def trained(seed: int) -> Training:
    training = make_training(seed)
    training.run(1)
    return training


def write_weights(folder: Path) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")


def save(
    manager: CheckpointManager,
    step: int,
    training: Training,
    *,
    metrics: dict[str, float] | None = None,
    extra: dict[str, Any] | None = None,
    export: Callable[[Path], None] = write_weights,
) -> Path:
    rest = {"extra": extra or {}, "metrics": metrics or {}, "config": {"seed": 0}, "export": export}
    return manager.save(step, **training._asdict(), **rest)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of this process alone, as a recipe on one device has."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(output_dir=str(tmp_path), every_n_steps=1, keep_last=2)


@pytest.fixture(scope="module")
def training() -> Training:
    return trained(0)


# --- Resume ---


def _interrupt_and_resume(rank: int, folder: str, saved_by_one_rank: str) -> dict[str, Any]:
    """An uninterrupted run of 3 + 2 steps, and its last 2 again from the checkpoint of step 3."""
    manager = CheckpointManager(output_dir=folder, every_n_steps=3)
    whole = make_training(0)
    for generator_seed in (torch.manual_seed, random.seed, np.random.seed):
        generator_seed(100 + rank)
    whole.run(3)
    path = save(manager, 3, whole, extra={"position": 12})
    at_save = whole.tensors()
    after = whole.run(2)

    resumed = make_training(1)
    step, extra = manager.load(path, **resumed._asdict())
    result = {"returned": (step, extra), "after": (after, resumed.run(2)), "at_save": at_save}
    result["end"] = (whole.tensors(), resumed.tensors())
    other = make_training(2)
    manager.load(Path(saved_by_one_rank), **other._asdict())
    return result | {"from_one_rank": other.tensors()}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> dict[str, Any]:
    """What two ranks saved and loaded, beside a checkpoint of one rank that they loaded."""
    folder = tmp_path_factory.mktemp("two_ranks")
    single = make_training(5)
    single.run(2)
    alone = CheckpointManager(output_dir=str(folder / "alone"), every_n_steps=1)
    path = save(alone, 2, single)
    ranks = run_ranks(_interrupt_and_resume, str(folder / "run"), str(path))
    return {"ranks": ranks, "folder": folder / "run", "single": single.tensors()}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys() and len(got) == 12  # 3 parameters, each with step and two moments
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_resume_equals_the_uninterrupted_run_bit_for_bit(two_ranks):
    for result in two_ranks["ranks"]:
        assert result["returned"] == (3, {"position": 12})
        uninterrupted, resumed = result["after"]
        assert resumed == uninterrupted
        assert_equal(result["end"][1], result["end"][0])
    assert two_ranks["ranks"][0]["after"] != two_ranks["ranks"][1]["after"]  # each rank has its own random state


def test_load_of_two_ranks_state_on_one_rank(two_ranks):
    manager = CheckpointManager(output_dir=str(two_ranks["folder"]), every_n_steps=1)
    for shard in (True, False):
        training = make_training(3, shard=shard)
        before = torch.get_rng_state()
        manager.load(newest_checkpoint(manager.folder), **training._asdict())
        assert_equal(training.tensors(), two_ranks["ranks"][0]["at_save"])
        assert torch.equal(torch.get_rng_state(), before)  # nobody's random state fits another number of ranks


def test_load_of_one_ranks_state_on_two_ranks(two_ranks):
    for result in two_ranks["ranks"]:
        assert_equal(result["from_one_rank"], two_ranks["single"])


def test_load_keeps_tied_weights_tied(two_ranks):
    training = make_training(3, shard=False)
    manager = CheckpointManager(output_dir=str(two_ranks["folder"]), every_n_steps=1)
    manager.load(newest_checkpoint(manager.folder), **training._asdict())
    assert training.model.head.weight is training.model.embedding.weight


def test_load_into_another_model_is_an_error_that_names_resume(manager, training):
    path = save(manager, 1, training)
    with pytest.raises(RankError, match="^resume: loading .*step_00000001: rank 0: "):
        manager.load(path, **make_training(0, dim=4)._asdict())


def test_load_without_a_scheduler(manager, training):
    path = save(manager, 4, training._replace(scheduler=None))
    loaded = make_training(9)._replace(scheduler=None)
    assert manager.load(path, **loaded._asdict()) == (4, {})
    assert_equal(loaded.tensors(), training.tensors())


# --- What a save leaves behind ---


def test_save_writes_state_and_weights(manager, training):
    path = save(manager, 10, training, metrics={"success": 0.5}, extra={"tokens": 7})
    assert path == manager.folder / "step_00000010"
    state = json.loads((path / "state.json").read_text())
    assert state.pop("versions").keys() == {"torch", "torchtune"}
    expected = {"step": 10, "world_size": 1, "extra": {"tokens": 7}, "metrics": {"success": 0.5}}
    assert state == expected | {"config": {"seed": 0}}
    assert resolve_weights(str(path)) == path / "hf"


def test_save_of_a_step_already_saved_changes_nothing(manager, training):
    path = save(manager, 10, training, extra={"tokens": 7})
    assert save(manager, 10, training, extra={"tokens": 8}) == path
    assert json.loads((path / "state.json").read_text())["extra"] == {"tokens": 7}


def test_save_makes_every_file_durable_before_the_rename(manager, training, monkeypatch):
    synced = []
    sync = checkpoints._fsync
    monkeypatch.setattr(checkpoints, "_fsync", lambda path: (synced.append(path), sync(path)))
    path = save(manager, 1, training)
    *before, after = synced
    assert after == path.parent
    written = {found.relative_to(path) for found in path.rglob("*")} | {Path(".")}
    assert {found.relative_to(path.with_name(".step_00000001.tmp")) for found in before} == written


def _kill_in_mid_save(rank: int, folder: str) -> None:
    manager = CheckpointManager(output_dir=folder, every_n_steps=1)
    training = trained(0)
    save(manager, 1, training)
    save(manager, 2, training, export=lambda path: os._exit(3))


def test_save_killed_halfway_leaves_the_previous_checkpoint(tmp_path):
    with pytest.raises(ProcessExitedException):
        run_ranks(_kill_in_mid_save, str(tmp_path))
    manager = CheckpointManager(output_dir=str(tmp_path), every_n_steps=1)
    assert (manager.folder / ".step_00000002.tmp").exists()
    assert manager.start("auto") == manager.folder / "step_00000001"
    assert [path.name for path in manager.folder.iterdir()] == ["step_00000001"]
    assert manager.load(manager.folder / "step_00000001", **make_training(1)._asdict())[0] == 1


def _fail_in_export(rank: int, folder: str) -> list[str]:
    manager = CheckpointManager(output_dir=folder, every_n_steps=1)
    training = trained(0)
    save(manager, 1, training)
    messages = []
    for failing in (0, 1):

        def export(path: Path, failing: int = failing) -> None:
            if rank == failing:
                raise OSError(28, "No space left on device")

        try:
            save(manager, 2, training, export=export)
        except RankError as error:
            messages.append(str(error))
    return messages


def test_save_that_fails_on_one_rank_fails_on_all_and_costs_nothing(tmp_path):
    reason = "OSError: [Errno 28] No space left on device"
    expected = [f"checkpoint of step 2, export: rank {rank}: {reason}" for rank in (0, 1)]
    assert run_ranks(_fail_in_export, str(tmp_path)) == [expected, expected]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_save_of_what_json_cannot_hold_fails_and_cleans_up(manager, training):
    with pytest.raises(RankError, match="checkpoint of step 1, completing it: rank 0: TypeError"):
        save(manager, 1, training, extra={"bad": object()})
    assert list(manager.folder.iterdir()) == []


# --- Pruning ---


def kept_steps(manager: CheckpointManager) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in manager.folder.glob("step_*"))


def test_prune_keeps_the_last_and_the_best(tmp_path, training):
    best = {"keep_best": 1, "best_metric": "success"}
    manager = CheckpointManager(output_dir=str(tmp_path), every_n_steps=1, keep_last=2, **best)
    scores = [
        {"success": 0.1},
        {"success": 0.9},
        {"success": 0.9},
        {"success": float("nan")},
        {},
        {"success": 0.2},
    ]
    for step, metrics in enumerate(scores, start=1):
        save(manager, step, training, metrics=metrics)
    assert kept_steps(manager) == [3, 5, 6]


def test_prune_orders_steps_as_numbers(manager, training):
    for step in (99_999_999, 100_000_000, 100_000_001):
        save(manager, step, training)
    assert kept_steps(manager) == [100_000_000, 100_000_001]


def test_prune_that_is_killed_leaves_no_half_checkpoint(tmp_path, training, monkeypatch):
    manager = CheckpointManager(output_dir=str(tmp_path), every_n_steps=1, keep_last=1)
    save(manager, 1, training)
    remove = shutil.rmtree

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if "00000001" in path.name:
            raise KeyboardInterrupt
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(checkpoints.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(manager, 2, training)
    assert kept_steps(manager) == [2]


# --- Where to resume ---


def test_is_due_every_n_steps():
    manager = CheckpointManager(output_dir="unused", every_n_steps=3)
    assert [step for step in range(1, 8) if manager.is_due(step)] == [3, 6]


def test_start_of_a_fresh_run(manager):
    assert [manager.start(resume) for resume in ("auto", None)] == [None, None]


def test_start_auto_takes_the_newest(manager, training):
    for step in (9, 10):
        save(manager, step, training)
    (manager.folder / "step_00000011").mkdir()  # not ours: it has no state
    assert manager.start("auto") == manager.folder / "step_00000010"
    assert manager.start(str(manager.folder / "step_00000010")) == manager.folder / "step_00000010"


@pytest.mark.parametrize("resume", [None, "checkpoints/step_00000009"])
def test_start_refuses_to_write_among_newer_checkpoints(manager, training, monkeypatch, resume):
    monkeypatch.chdir(manager.output_dir)
    for step in (9, 10):
        save(manager, step, training)
    with pytest.raises(ConfigError, match="^resume: got .*output_dir already holds .*step_00000010"):
        manager.start(resume)


def test_start_takes_a_checkpoint_of_another_run(manager, training, tmp_path):
    path = save(manager, 9, training)
    fork = CheckpointManager(output_dir=str(tmp_path / "fork"), every_n_steps=1)
    assert fork.start(str(path)) == path


def test_start_refuses_a_path_that_is_no_checkpoint(manager, tmp_path):
    with pytest.raises(ConfigError, match="^resume: got '.*', expected 'auto', null or a checkpoint folder"):
        manager.start(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps: got 0, expected at least 1"),
        ({"keep_last": 0}, "keep_last: got 0, expected at least 1"),
        ({"keep_best": -1}, "keep_best: got -1, expected at least 0"),
        ({"keep_best": 1}, "best_metric: got null, expected a metric's name"),
    ],
)
def test_manager_refuses_settings_without_a_meaning(changes, message):
    with pytest.raises(ConfigError, match=message):
        CheckpointManager(**({"output_dir": "x", "every_n_steps": 1} | changes))


# --- Weights ---


def test_resolve_weights_accepts_a_folder_a_checkpoint_or_a_run(manager, training):
    for step in (1, 2):
        save(manager, step, training)
    expected = manager.folder / "step_00000002" / "hf"
    for path in (expected, expected.parent, manager.output_dir):
        assert resolve_weights(str(path)) == expected


def test_resolve_weights_says_what_it_found(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="^weights: got '.*', which is a folder with config.json; expected"):
        resolve_weights(str(tmp_path))
    with pytest.raises(ConfigError, match="^teacher: got 'nowhere', which is no folder; expected"):
        resolve_weights("nowhere", key="teacher")

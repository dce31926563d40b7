import json
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing import ProcessExitedException

from tests.torchtune_grpo.distributed_helpers import run_ranks
from tests.torchtune_grpo.training.small_training import make_training, save, trained, write_weights
from torchtune_grpo.collectives import RankError
from torchtune_grpo.config import ConfigError
from torchtune_grpo.training import checkpoint_files, checkpoints
from torchtune_grpo.training.checkpoint_files import newest_checkpoint, resolve_weights
from torchtune_grpo.training.checkpoints import CheckpointManager

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(output_dir=str(tmp_path), every_n_steps=1, keep_last=2)


def kept_steps(manager: CheckpointManager) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in manager.folder.glob("step_*"))


# --- Resume ---


def _interrupt_and_resume(rank: int, folder: str, saved_by_one_rank: str) -> dict[str, Any]:
    """An uninterrupted run of 3 + 2 steps, and its last 2 again from the checkpoint of step 3.

    The save of step 3 writes nothing before the two steps after it are done.
    """
    manager = CheckpointManager(output_dir=folder, every_n_steps=3)
    whole = make_training(0)
    for generator_seed in (torch.manual_seed, random.seed, np.random.seed):
        generator_seed(100 + rank)
    whole.run(3)
    went_on, write = threading.Event(), checkpoints.dcp.save
    checkpoints.dcp.save = lambda *args, **kwargs: (went_on.wait(30), write(*args, **kwargs))
    own = {"local": {"sum": torch.tensor(rank)}, "metrics": {}, "config": {}}
    path = manager.save(3, **whole._asdict(), extra={"position": 12}, **own, export=lambda: write_weights)
    at_save = whole.tensors()
    after = whole.run(2)
    assert not path.exists()
    went_on.set()
    manager.wait()

    resumed = make_training(1)
    loaded = manager.load(path, **resumed._asdict())
    local = [int(part["sum"]) for part in loaded.local]
    result = {"returned": (loaded.step, loaded.extra, local, loaded.same_ranks), "at_save": at_save}
    result |= {"after": (after, resumed.run(2)), "end": (whole.tensors(), resumed.tensors())}
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
    for rank, result in enumerate(two_ranks["ranks"]):
        assert result["returned"] == (3, {"position": 12}, [rank], True)
        uninterrupted, resumed = result["after"]
        assert resumed == uninterrupted
        assert_equal(result["end"][1], result["end"][0])
    assert two_ranks["ranks"][0]["after"] != two_ranks["ranks"][1]["after"]  # each rank has its own random state


def test_load_of_two_ranks_state_on_one_rank(two_ranks):
    manager = CheckpointManager(output_dir=str(two_ranks["folder"]), every_n_steps=1)
    for shard in (True, False):
        training = make_training(3, shard=shard)
        before = torch.get_rng_state()
        loaded = manager.load(newest_checkpoint(manager.folder), **training._asdict())
        assert [int(part["sum"]) for part in loaded.local] == [0, 1] and not loaded.same_ranks
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
    assert manager.load(path, **loaded._asdict()).step == 4
    assert_equal(loaded.tensors(), training.tensors())


# --- What a save leaves behind ---


def test_save_writes_state_and_weights(manager, training):
    path = save(manager, 10, training, metrics={"success": 0.5}, extra={"tokens": 7})
    assert path == manager.folder / "step_00000010"
    state = json.loads((path / "state.json").read_text())
    assert state.pop("versions").keys() == {"torch", "torchtune"}
    assert state == {"step": 10, "world_size": 1, "extra": {"tokens": 7}, "config": {"seed": 0}}
    assert json.loads((path / "metrics.json").read_text()) == {"success": 0.5}
    assert resolve_weights(str(path)) == path / "hf"


def test_save_of_a_step_already_saved_adds_its_metrics_alone(manager, training):
    path = save(manager, 10, training, extra={"tokens": 7})
    assert save(manager, 10, training, extra={"tokens": 8}, metrics={"success": 0.5}) == path
    save(manager, 10, training)
    assert json.loads((path / "state.json").read_text())["extra"] == {"tokens": 7}
    assert json.loads((path / "metrics.json").read_text()) == {"success": 0.5}
    assert manager.start("auto") == path


def test_save_makes_every_file_durable_before_the_rename(manager, training, monkeypatch):
    synced = []
    sync = checkpoint_files._fsync
    monkeypatch.setattr(checkpoint_files, "_fsync", lambda path: (synced.append(path), sync(path)))
    path = save(manager, 1, training)
    *before, after = synced
    assert after == path.parent
    written = {found.relative_to(path) for found in path.rglob("*")} | {Path(".")}
    assert {found.relative_to(path.with_name(".step_00000001.tmp")) for found in before} == written


def _kill_in_mid_save(rank: int, folder: str) -> None:
    manager = CheckpointManager(output_dir=folder, every_n_steps=1)
    training = trained(0)
    save(manager, 1, training)
    save(manager, 2, training, write=lambda path: os._exit(3))


def test_save_killed_halfway_leaves_the_previous_checkpoint(tmp_path):
    with pytest.raises(ProcessExitedException):
        run_ranks(_kill_in_mid_save, str(tmp_path))
    manager = CheckpointManager(output_dir=str(tmp_path), every_n_steps=1)
    assert (manager.folder / ".step_00000002.tmp").exists()
    assert manager.start("auto") == manager.folder / "step_00000001"
    assert [path.name for path in manager.folder.iterdir()] == ["step_00000001"]
    assert manager.load(manager.folder / "step_00000001", **make_training(1)._asdict()).step == 1


def _fail_in_export(rank: int, folder: str) -> list[str]:
    manager = CheckpointManager(output_dir=folder, every_n_steps=1)
    training = trained(0)
    save(manager, 1, training)
    messages = []
    for failing in (0, 1):

        def write(path: Path, failing: int = failing) -> None:
            if rank == failing:
                raise OSError(28, "No space left on device")

        try:
            save(manager, 2, training, write=write)
        except RankError as error:
            messages.append(str(error))
    return messages


def test_save_that_fails_on_one_rank_fails_on_all_and_costs_nothing(tmp_path):
    reason = "OSError: [Errno 28] No space left on device"
    expected = [f"checkpoint of step 2, export: rank {rank}: {reason}" for rank in (0, 1)]
    assert run_ranks(_fail_in_export, str(tmp_path)) == [expected, expected]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_save_of_what_json_cannot_hold_fails_and_cleans_up(manager, training):
    with pytest.raises(RankError, match="checkpoint of step 1, copying the state: rank 0: TypeError"):
        save(manager, 1, training, extra={"bad": object()})
    assert not manager.folder.exists()


def test_save_in_the_background_fails_at_the_next_one_and_names_its_step(manager, training):
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    save(manager, 1, training)
    rest = {"extra": {}, "local": {}, "metrics": {}, "config": {}}
    manager.save(2, **training._asdict(), **rest, export=lambda: full)
    with pytest.raises(RankError, match="checkpoint of step 2, export: rank 0: OSError: .* No space left"):
        save(manager, 3, training)
    assert kept_steps(manager) == [1]
    manager.wait()  # told once
    save(manager, 3, training)
    assert kept_steps(manager) == [1, 3]


def test_save_without_asynchronous_is_complete_when_it_returns(tmp_path, training):
    manager = CheckpointManager(output_dir=str(tmp_path), every_n_steps=1, asynchronous=False)
    rest = {"extra": {}, "local": {}, "metrics": {}, "config": {}}
    manager.save(1, **training._asdict(), **rest, export=lambda: write_weights)
    assert kept_steps(manager) == [1]


# --- Pruning ---


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


def test_start_of_a_fresh_run(manager):
    assert [manager.start(resume) for resume in ("auto", None)] == [None, None]


def test_start_auto_takes_the_newest(manager, training):
    for step in (9, 10):
        save(manager, step, training)
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

"""Which checkpoints are damaged and what becomes of them; which folder of weights a path means."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.torchtune_grpo.distributed_helpers import run_ranks
from tests.torchtune_grpo.training.small_training import save, trained
from torchtune_grpo.config import ConfigError
from torchtune_grpo.training.checkpoint_files import resolve_weights
from torchtune_grpo.training.checkpoints import CheckpointManager

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(output_dir=str(tmp_path), every_n_steps=1, keep_last=3)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "truncated": ("train/__0_0.distcp", lambda path: path.write_bytes(path.read_bytes()[:-1]), "has .* bytes"),
    "bit_flipped": ("train/__0_0.distcp", _flip, "is not what was written"),
    "bit_flipped_in_state": ("state.json", _flip, "state.json is not what was written"),
    "half_deleted": ("ranks/rank_0.pt", Path.unlink, "ranks/rank_0.pt is missing"),
    "without_state": ("state.json", Path.unlink, "state.json is missing"),
    "manifest_truncated": ("manifest.json", lambda path: path.write_text(path.read_text()[:-9]), "manifest.json: "),
    "manifest_deleted": ("manifest.json", Path.unlink, "manifest.json: "),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_start_passes_over_a_damaged_checkpoint_and_says_so(manager, training, kind):
    name, damage, message = DAMAGES[kind]
    older, newer = (save(manager, step, training) for step in (1, 2))
    damage(newer / name)
    with pytest.warns(
        UserWarning, match=f"step_00000002 is damaged and passed over, .*damaged_step_00000002_.*: .*{message}"
    ):
        assert manager.start("auto") == older
    assert manager.start("auto") == older  # without a warning: the damaged one is out of the way
    save(manager, 2, training)
    assert manager.start("auto") == newer


def test_start_does_not_start_afresh_where_all_checkpoints_are_damaged(manager, training):
    for step in (1, 2):
        _flip(save(manager, step, training) / "hf/model.safetensors")
    for _ in range(2):  # nothing was moved: the second attempt must not find an empty folder
        with pytest.raises(ConfigError, match="(?s)^resume: got 'auto', .*step_00000002 is damaged.*step_00000001 is"):
            manager.start("auto")


def test_start_from_a_damaged_path_is_an_error(manager, training):
    save(manager, 1, training)
    path = save(manager, 2, training)
    _flip(path / "train/.metadata")
    with pytest.raises(ConfigError, match="^resume: got .*step_00000002.*\n.*is damaged: train/.metadata is not what"):
        manager.start(str(path))
    assert path.exists()


def _damage_on_two_ranks(rank: int, folder: str) -> tuple[str | None, str]:
    manager = CheckpointManager(output_dir=folder, every_n_steps=1)
    for step in (1, 2):
        save(manager, step, trained(0))
    before = manager.start("auto")
    if rank == 1:
        _flip(before / "train/__1_0.distcp")
    dist.barrier()
    return before.name, manager.start("auto").name


@pytest.mark.filterwarnings("ignore:.*is damaged and passed over")
def test_start_is_the_same_on_every_rank(tmp_path):
    assert run_ranks(_damage_on_two_ranks, str(tmp_path)) == [("step_00000002", "step_00000001")] * 2


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

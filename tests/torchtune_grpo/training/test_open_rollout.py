"""A rollout with updates left, taken up by as many ranks as saved it, by fewer, and by more."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.torchtune_grpo.builders import PAD, make_rollout, make_trajectory
from torchtune_grpo.distillation import DistillationTrajectory
from torchtune_grpo.microbatches import crop, minibatch
from torchtune_grpo.training.checkpoints import Resumed
from torchtune_grpo.training.distributed import Ranks
from torchtune_grpo.training.open_rollout import resume_rollout, rollout_state
from torchtune_grpo.types import Trajectory

LENGTHS = [[3, 1, 2, 5, 1, 1, 4, 2], [2, 2, 6, 1, 3, 3, 1, 1]]


def _trajectory(rank: int) -> Trajectory:
    """Four groups of two on each of two ranks, of other widths; answers name rank and row."""
    prompts = [2 + rank] * 8
    rollout = make_rollout(LENGTHS[rank], prompt_lengths=prompts, group_size=2, extra=rank, seed=rank)
    rollout = replace(rollout, answers=[f"{rank}.{row}" for row in range(8)])
    return make_trajectory(rollout, [10.0 * rank + row for row in range(8)])


def _saved(tmp_path: Path, trajectories: list[Trajectory]) -> list[dict]:
    """As ``torch.load`` gives it back, which by default takes nothing but tensors and plain values."""
    local = []
    for rank, trajectory in enumerate(trajectories):
        torch.save({"rollout": rollout_state(trajectory, [["a sample", rank]])}, tmp_path / f"{rank}.pt")
        local.append(torch.load(tmp_path / f"{rank}.pt"))
    return local


def _resume(kind: type[Trajectory], local: list[dict], rank: int, world_size: int, same_ranks: bool) -> Trajectory:
    resumed = Resumed(step=1, extra={}, local=local, same_ranks=same_ranks)
    ranks = Ranks(device=torch.device("cpu"), rank=rank, world_size=world_size)
    trajectory, samples = resume_rollout(kind, resumed, ranks, minibatches=2, pad_id=PAD)
    assert samples == [["a sample", local[0]["rollout"]["samples"][0][1]]]
    return trajectory


def _content(trajectory: Trajectory) -> list[tuple[str, list, list, list]]:
    """Every row without its padding."""
    rows = []
    for i, answer in enumerate(trajectory.rollout.answers):
        one = crop(trajectory.rows(torch.tensor([i])))
        rows.append((answer, one.rollout.tokens.tolist(), one.rollout.positions.tolist(), one.advantages.tolist()))
    return rows


def test_same_ranks_get_back_their_own_bit_for_bit(tmp_path: Path) -> None:
    for rank in (0, 1):
        expected = _trajectory(rank)
        got = _resume(Trajectory, _saved(tmp_path, [expected]), rank, 2, same_ranks=True)
        for name in ("advantages", "ref_logprobs", "token_weights"):
            assert torch.equal(getattr(got, name), getattr(expected, name))
        for name in ("tokens", "positions", "response_mask", "old_logprobs", "truncated", "groups"):
            assert torch.equal(getattr(got.rollout, name), getattr(expected.rollout, name))
        assert (got.rollout.answers, got.rollout.group_size) == (expected.rollout.answers, 2)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_minibatches_of_other_ranks_hold_the_rows_that_they_would_have_held(tmp_path: Path, world_size: int) -> None:
    saved = [_trajectory(rank) for rank in (0, 1)]
    local = _saved(tmp_path, saved)
    parts = [_resume(Trajectory, local, rank, world_size, same_ranks=False) for rank in range(world_size)]
    for number in (0, 1):
        expected = [row for part in saved for row in _content(minibatch(part, number, of=2))]
        assert [row for part in parts for row in _content(minibatch(part, number, of=2))] == expected
    groups = [part.rollout.groups.tolist() for part in parts]
    assert all(a == b for part in groups for a, b in zip(part[::2], part[1::2], strict=True))


def test_distillation_trajectory_keeps_teachers_and_payload_with_their_rows(tmp_path: Path) -> None:
    saved = []
    for rank in (0, 1):
        trajectory = _trajectory(rank)
        values = {name: getattr(trajectory, name) for name in ("rollout", "advantages", "ref_logprobs")}
        payload = [torch.full((length, 3), 10.0 * rank + row) for row, length in enumerate(LENGTHS[rank])]
        index = torch.arange(8) + 8 * rank
        saved.append(
            DistillationTrajectory(
                **values, token_weights=trajectory.token_weights, teacher_index=index, payload=payload
            )
        )
    whole = _resume(DistillationTrajectory, _saved(tmp_path, saved), 0, 1, same_ranks=False)
    assert whole.teacher_index.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    assert [float(part[0, 0]) for part in whole.payload] == [0, 1, 2, 3, 10, 11, 12, 13, 4, 5, 6, 7, 14, 15, 16, 17]
    assert [len(part) for part in whole.payload] == whole.rollout.response_lengths.tolist()


def test_nothing_is_taken_up_between_two_rollouts() -> None:
    resumed = Resumed(step=4, extra={}, local=[{"rollout": None}])
    ranks = Ranks(device=torch.device("cpu"), rank=0, world_size=1)
    assert resume_rollout(Trajectory, resumed, ranks, minibatches=2, pad_id=PAD) is None

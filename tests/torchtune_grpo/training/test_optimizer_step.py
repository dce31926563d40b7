import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.torchtune_grpo.builders import make_rollout, make_trajectory
from tests.torchtune_grpo.distributed_helpers import run_ranks
from torchtune_grpo.data.loader import SFTBatch
from torchtune_grpo.failures import RunError
from torchtune_grpo.training.optimizer_step import OptimizerStep

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
BATCH = SFTBatch(tokens=torch.tensor([[1, 2]]), lengths=torch.tensor([2]), loss_mask=torch.tensor([[False, True]]))


class _Line(nn.Module):
    """Two parameters whose gradients a test sets by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))


def _optimizer_step(
    folder: Path, clip: float | None = 1.0, max_skipped: int = 5
) -> tuple[_Line, OptimizerStep, torch.optim.Optimizer]:
    model = _Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, OptimizerStep(model, optimizer, scheduler, clip, max_skipped=max_skipped, folder=folder), optimizer


def test_optimizer_step_clips_steps_and_reports(tmp_path: Path) -> None:
    model, step, optimizer = _optimizer_step(tmp_path, clip=2.5)
    model.weight.grad = torch.tensor([3.0, 4.0])  # norm 5, scaled to [1.5, 2.0]
    metrics = step(BATCH, 1)
    assert metrics == pytest.approx({"grad_norm": 5.0, "lr": 0.1, "skipped_updates": 0.0})
    torch.testing.assert_close(model.weight.detach(), torch.tensor([1 - 0.15, 2 - 0.2]))
    assert model.weight.grad is None
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)  # the scheduler's turn


@pytest.mark.parametrize("clip", [10.0, None])
def test_optimizer_step_leaves_gradients_below_the_limit_as_they_are(tmp_path: Path, clip: float | None) -> None:
    model, step, _ = _optimizer_step(tmp_path, clip=clip)
    model.weight.grad = torch.tensor([3.0, 4.0])
    assert step(BATCH, 1)["grad_norm"] == 5.0
    torch.testing.assert_close(model.weight.detach(), torch.tensor([0.7, 1.6]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_optimizer_step_skips_gradients_that_are_not_finite(tmp_path: Path, bad: float) -> None:
    model, step, optimizer = _optimizer_step(tmp_path)
    model.weight.grad = torch.tensor([bad, 1.0])
    assert step(BATCH, 1)["skipped_updates"] == 1.0
    assert model.weight.tolist() == [1.0, 2.0] and model.weight.grad is None
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)  # the schedule goes on
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_skipped(tmp_path: Path, bad: float) -> None:
    model, step, _ = _optimizer_step(tmp_path)
    (model.weight * bad).sum().backward()
    assert step(BATCH, 1)["skipped_updates"] == 1.0
    assert model.weight.tolist() == [1.0, 2.0]


def test_optimizer_step_stops_after_too_many_skips_in_a_row_and_keeps_the_batch(tmp_path: Path) -> None:
    model, step, _ = _optimizer_step(tmp_path, max_skipped=3)
    trajectory = make_trajectory(make_rollout([2, 1]), [0.5, -0.5])
    for number, bad in enumerate([True, True, False, True, True], start=1):  # the good one starts the count again
        model.weight.grad = torch.tensor([math.nan if bad else 1.0, 1.0])
        step(trajectory, number)
    after_the_good_one = model.weight.tolist()
    model.weight.grad = torch.tensor([math.nan, 1.0])
    path = tmp_path / "nonfinite_step_6_rank_0.pt"
    with pytest.raises(RunError, match=f"step 6: update number 3 in a row .*max_skipped_updates.*optimizer.lr.*{path}"):
        step(trajectory, 6)
    assert model.weight.tolist() == after_the_good_one
    kept = torch.load(path, weights_only=True)
    assert torch.equal(kept["advantages"], trajectory.advantages)
    assert torch.equal(kept["rollout"]["tokens"], trajectory.rollout.tokens)
    assert torch.equal(kept["rollout"]["response_mask"], trajectory.rollout.response_mask)
    assert kept["rollout"]["answers"] == trajectory.rollout.answers


def test_a_batch_that_cannot_be_kept_does_not_hide_the_fault(tmp_path: Path) -> None:
    model, step, _ = _optimizer_step(tmp_path / "absent", max_skipped=1)
    model.weight.grad = torch.tensor([math.nan, 1.0])
    with pytest.raises(RunError, match="step 1: .*could not be written to .*absent"):
        step(BATCH, 1)


def test_optimizer_step_works_without_a_scheduler(tmp_path: Path) -> None:
    model = _Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = OptimizerStep(model, optimizer, None, 1.0, max_skipped=5, folder=tmp_path)
    model.weight.grad = torch.ones(2)
    assert step(BATCH, 1)["lr"] == pytest.approx(0.1)


def _all_ranks_stop(rank: int, folder: Path) -> tuple[str, bool]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 4)
    fully_shard(model)
    before = [p.to_local().clone() for p in model.parameters()]
    step = OptimizerStep(model, torch.optim.SGD(model.parameters(), lr=1.0), None, 1.0, max_skipped=1, folder=folder)
    (model(torch.ones(1, 4)).sum() * (math.nan if rank else 1.0)).backward()
    try:
        step(BATCH, 1)
    except RunError as error:
        kept = all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))
        return str(error), kept
    return "no error", False


def test_one_rank_s_nan_stops_both_and_each_keeps_its_batch(tmp_path: Path) -> None:
    for message, kept in run_ranks(_all_ranks_stop, tmp_path):
        assert message.startswith("step 1: ") and kept
    assert {path.name for path in tmp_path.iterdir()} == {f"nonfinite_step_1_rank_{rank}.pt" for rank in (0, 1)}

"""Eight completions of unequal length give the same gradient however they are spread over ranks and parts."""

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist

from tests.torchtune_grpo.builders import BigramPolicy, bigram_logprobs, make_rollout, make_trajectory
from tests.torchtune_grpo.distributed_helpers import run_ranks
from torchtune_grpo.losses import CISPO, GSPO, ClippedSurrogate, KLToReference, SumLoss
from torchtune_grpo.microbatches import crop, split_in_step
from torchtune_grpo.normalization import ConstantLength, SequenceMean, TokenMean, normalize
from torchtune_grpo.types import Trajectory

NORMALIZERS = [TokenMean(), SequenceMean(), ConstantLength(length=9)]
LOSSES = [
    SumLoss(terms=[ClippedSurrogate(), KLToReference(coefficient=0.1)]),
    GSPO(clip_low=0.3, clip_high=0.3),
    CISPO(),
]
RANK_ROWS = [[0, 1, 2, 3, 4], [5, 6, 7]]


def _trajectory() -> Trajectory:
    rollout = make_rollout([3, 1, 7, 2, 5, 4, 0, 6], prompt_lengths=[1, 4, 2, 3, 2, 2, 5, 1], extra=2)
    ref = (rollout.old_logprobs - 0.3).masked_fill(~rollout.response_mask, 0.0)
    return make_trajectory(rollout, [1.0, -0.5, 0.7, -1.2, 0.3, 0.0, 2.0, -0.8], ref_logprobs=ref)


def _gradient(parts: Iterable[Trajectory], loss_fn) -> torch.Tensor:
    """Averaged over ranks, as FSDP does."""
    model = BigramPolicy(dtype=torch.float32)
    for part in parts:
        loss_fn(bigram_logprobs(model, part.rollout), part).loss.backward()
    if dist.is_initialized():
        dist.all_reduce(model.weight.grad)
        model.weight.grad /= dist.get_world_size()
    return model.weight.grad


def _gradients_on_rank(rank: int) -> list[torch.Tensor]:
    mine = _trajectory().rows(torch.tensor(RANK_ROWS[rank]))
    weighted = [normalize(mine, normalizer, world_size_for_averaging=2) for normalizer in NORMALIZERS]
    return [
        _gradient(split_in_step(trajectory, bigram_logprobs, max_tokens=12), loss_fn)
        for trajectory in weighted
        for loss_fn in LOSSES
    ]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, "budget"])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_gradient_does_not_depend_on_micro_batches(rows: int | str, normalizer, loss_fn) -> None:
    trajectory = normalize(_trajectory(), normalizer, world_size_for_averaging=1)
    if rows == "budget":
        parts = split_in_step(trajectory, bigram_logprobs, max_tokens=20)
    else:
        parts = [crop(trajectory.rows(index)) for index in torch.arange(8).split(rows)]
    whole = _gradient([trajectory], loss_fn)
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(_gradient(parts, loss_fn), whole, atol=1e-6, rtol=0)


def test_gradient_does_not_depend_on_ranks() -> None:
    expected = [
        _gradient([normalize(_trajectory(), normalizer, world_size_for_averaging=1)], loss_fn)
        for normalizer in NORMALIZERS
        for loss_fn in LOSSES
    ]
    for rank in run_ranks(_gradients_on_rank):
        torch.testing.assert_close(rank, expected, atol=1e-6, rtol=0)

"""Weights by hand; that the gradient does not depend on ranks or micro-batches is in test_invariance.py."""

import math
from dataclasses import replace

import pytest
import torch

from tests.torchtune_grpo.builders import make_rewards, make_rollout, make_trajectory
from tests.torchtune_grpo.distributed_helpers import run_ranks
from torchtune_grpo.config import ConfigError
from torchtune_grpo.normalization import (
    ConstantLength,
    Normalizer,
    SequenceMean,
    TokenMean,
    TrainedRows,
    normalize,
)

T, F = True, False
MASK = torch.tensor([[T, T, T], [T, F, F], [F, F, F]])
# By hand: 4 tokens; 2 rows that are trained; length 5.
WEIGHTS = {
    TokenMean(): [[1 / 4] * 3, [1 / 4, 0, 0], [0] * 3],
    SequenceMean(): [[1 / 6] * 3, [1 / 2, 0, 0], [0] * 3],
    ConstantLength(length=5): [[1 / 10] * 3, [1 / 10, 0, 0], [0] * 3],
}


@pytest.mark.parametrize(("normalizer", "expected"), WEIGHTS.items())
def test_normalizer_weights_by_hand(normalizer: Normalizer, expected: list[list[float]]) -> None:
    weights = normalizer(MASK, world_size_for_averaging=1)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.parametrize("normalizer", WEIGHTS)
def test_normalizer_multiplies_by_ranks_that_average(normalizer: Normalizer) -> None:
    one, three = (normalizer(MASK, world_size_for_averaging=ranks) for ranks in (1, 3))
    torch.testing.assert_close(three, 3 * one)


@pytest.mark.parametrize("normalizer", WEIGHTS)
def test_normalizer_without_trained_token_is_zero(normalizer: Normalizer) -> None:
    weights = normalizer(torch.zeros(2, 3, dtype=torch.bool), world_size_for_averaging=1)
    assert torch.equal(weights, torch.zeros(2, 3))


def _weights_on_rank(rank: int) -> list[torch.Tensor]:
    # Rank 0 holds the long row, rank 1 the short one and the untrained one.
    mask = [MASK[:1], MASK[1:]][rank]
    empty = torch.zeros(1, 2, dtype=torch.bool)
    masks = [mask, empty if rank else mask]
    return [normalizer(m, world_size_for_averaging=2) for m in masks for normalizer in WEIGHTS]


def test_normalizer_counts_over_all_ranks() -> None:
    ranks = run_ranks(_weights_on_rank)
    for i, expected in enumerate(WEIGHTS.values()):
        torch.testing.assert_close(torch.cat([rank[i] for rank in ranks]), 2 * torch.tensor(expected))
    for i, alone in enumerate([1 / 3, 1 / 3, 1 / 5]):  # nothing to train on rank 1: it still makes the calls
        torch.testing.assert_close(ranks[0][3 + i], torch.full((1, 3), 2 * alone))
        assert torch.equal(ranks[1][3 + i], torch.zeros(1, 2))


def test_constant_length_refuses_less_than_one() -> None:
    with pytest.raises(ConfigError, match="length"):
        ConstantLength(length=0)


@pytest.mark.parametrize(
    ("component", "kept"),
    [
        (TrainedRows(), [T, T, T, T, T, F]),
        (TrainedRows(keep_unjudged=True), [T, T, T, T, T, T]),
        (TrainedRows(mask_truncated=True, keep_unjudged=True), [F, T, T, T, F, T]),
        (TrainedRows(mask_truncated=True), [F, T, T, T, F, F]),
        (TrainedRows(drop_zero_variance=True), [T, T, F, F, F, F]),
        (TrainedRows(mask_truncated=True, drop_zero_variance=True), [F, T, F, F, F, F]),
    ],
)
def test_trained_rows_by_hand(component: TrainedRows, kept: list[bool]) -> None:
    rollout = make_rollout([3, 1, 2, 2, 1, 1], group_size=2)
    rollout = replace(rollout, truncated=torch.tensor([T, F, F, F, T, F]))
    mask = component(rollout, make_rewards([1, 0, 1, 1, 1, math.nan]))
    assert torch.equal(mask, rollout.response_mask & torch.tensor(kept).unsqueeze(1))


def test_normalize_keeps_importance_weights_out_of_the_counts() -> None:
    rollout = make_rollout([2, 2])
    relative = torch.tensor([[2.0, 0.5], [0.0, 0.0]])
    trajectory = make_trajectory(rollout, [1, 1], token_weights=relative)
    normalized = normalize(trajectory, TokenMean(), world_size_for_averaging=1)
    torch.testing.assert_close(normalized.token_weights, torch.tensor([[1.0, 0.25], [0.0, 0.0]]))

"""That the gradient does not depend on how a trajectory is cut is in test_invariance.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.torchtune_grpo.builders import BigramLogprobs, BigramPolicy, bigram_logprobs, make_rollout, make_trajectory
from tests.torchtune_grpo.distributed_helpers import run_ranks
from torchtune_grpo.config import ConfigError
from torchtune_grpo.microbatches import (
    crop,
    crop_rollout,
    minibatch,
    plan_in_step,
    plan_lengths_in_step,
    plan_whole_groups,
    split_in_step,
)
from torchtune_grpo.types import Trajectory


def _trajectory(responses: list[int], prompts: list[int], group_size: int, extra: int = 2) -> Trajectory:
    rollout = make_rollout(responses, prompt_lengths=prompts, group_size=group_size, extra=extra)
    return make_trajectory(rollout, [float(row) for row in range(len(responses))])


def _plan(responses: list[int], prompts: list[int], group_size: int, max_tokens: int) -> list[list[int]]:
    rollout = make_rollout(responses, prompt_lengths=prompts, group_size=group_size, extra=2)
    return [rows.tolist() for rows in plan_whole_groups(rollout, max_tokens)]


def test_crop_removes_only_padding() -> None:
    trajectory = _trajectory([2, 3], [1, 4], group_size=2)
    cropped = crop(trajectory)
    rollout, whole = cropped.rollout, trajectory.rollout
    assert rollout.tokens.shape == (2, 4 + 3)
    assert rollout.prompt_width == 4
    # the fixture has two columns of padding on either side
    assert torch.equal(rollout.tokens, whole.tokens[:, 2:-2])
    assert torch.equal(rollout.positions, whole.positions[:, 2:-2])
    assert torch.equal(rollout.response_mask, whole.response_mask[:, :3])
    assert rollout.prompt_lengths.tolist() == [1, 4]
    assert rollout.response_lengths.tolist() == [2, 3]
    for name in ("advantages", "ref_logprobs", "token_weights"):
        assert torch.equal(getattr(cropped, name), getattr(trajectory, name)[:, :3])
    model = BigramPolicy()
    assert torch.equal(bigram_logprobs(model, rollout), bigram_logprobs(model, whole)[:, :3])


def test_crop_rollout_keeps_one_response_column() -> None:
    assert crop_rollout(make_rollout([0, 0], extra=3)).response_mask.shape == (2, 1)


def test_plan_fills_the_budget_with_whole_groups() -> None:
    # group widths: 2+4=6, 1+1=2, 2+1=3; two rows each. Longest first: 0, then 2, then 1.
    responses, prompts = [4, 1, 1, 1, 1, 1], [2, 2, 1, 1, 2, 2]
    assert _plan(responses, prompts, 2, 12) == [[0, 1], [4, 5, 2, 3]]
    assert _plan(responses, prompts, 2, 11) == [[0, 1], [4, 5], [2, 3]]  # the first exceeds it, on its own
    assert _plan(responses, prompts, 2, 23) == [[0, 1], [4, 5, 2, 3]]
    assert _plan(responses, prompts, 2, 24) == [[0, 1, 4, 5], [2, 3]]
    assert _plan(responses, prompts, 2, 36) == [[0, 1, 4, 5, 2, 3]]


def test_plan_counts_the_longest_prompt_plus_the_longest_response() -> None:
    # widths 1+5 and 5+1, together 5+5 in two rows
    assert len(_plan([5, 1], [1, 5], 1, 19)) == 2
    assert len(_plan([5, 1], [1, 5], 1, 20)) == 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 8)), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 80),
)
def test_plan_covers_every_row_once_within_budget(groups: list[tuple[int, int]], size: int, budget: int) -> None:
    prompts, responses = ([lengths[i] for lengths in groups for _ in range(size)] for i in range(2))
    parts = _plan(responses, prompts, size, budget)
    assert sorted(row for part in parts for row in part) == list(range(len(prompts)))
    for part in parts:
        assert [row % size for row in part] == list(range(size)) * (len(part) // size)
        cost = len(part) * (max(prompts[row] for row in part) + max(responses[row] for row in part))
        assert cost <= budget or len(part) == size


def test_plan_refuses_no_budget() -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        _plan([1], [1], 1, 0)


def test_split_in_step_crops_the_parts() -> None:
    parts = split_in_step(_trajectory([4, 1, 2], [1, 2, 2], group_size=1), bigram_logprobs, max_tokens=8)
    assert [part.rollout.answers for part in parts] == [["0"], ["2", "1"]]
    assert [tuple(part.rollout.tokens.shape) for part in parts] == [(1, 5), (2, 4)]
    assert parts[1].advantages.tolist() == [[2, 2], [1, 0]]


def _parts_on_rank(rank: int) -> tuple[list[float], list[list[int]], list[tuple[list[int], float]]]:
    responses = [[1, 1], [3, 3, 3]][rank]
    trajectory = _trajectory(responses, [1] * len(responses), group_size=1)
    weights = [part.token_weights.sum().item() for part in split_in_step(trajectory, bigram_logprobs, max_tokens=4)]
    planned = [rows.tolist() for rows in plan_in_step(trajectory.rollout, bigram_logprobs, max_tokens=4)]
    lengths = torch.tensor([[2, 4], [1, 3, 3]][rank])
    return weights, planned, [(rows.tolist(), w) for rows, w in plan_lengths_in_step(lengths, [8, 5][rank])]


def test_split_in_step_pads_the_rank_with_fewer_parts() -> None:
    (few, few_plan, few_rows), (many, many_plan, many_rows) = run_ranks(_parts_on_rank)
    assert few == [2, 0, 0]
    assert many == [3, 3, 3]
    assert few_plan == [[0, 1]] * 3
    assert many_plan == [[0], [1], [2]]
    assert few_rows == [([1, 0], 1.0), ([1, 0], 0.0), ([1, 0], 0.0)]
    assert many_rows == [([1], 1.0), ([2], 1.0), ([0], 1.0)]


def test_split_in_step_follows_the_plan_of_the_logprobs_function() -> None:
    class RowByRow(BigramLogprobs):
        def plan(self, rollout, max_tokens):
            return list(torch.arange(len(rollout)).flip(0).split(1))

    parts = split_in_step(_trajectory([1] * 4, [1] * 4, group_size=2), RowByRow(), max_tokens=100)
    assert [part.rollout.answers for part in parts] == [["3"], ["2"], ["1"], ["0"]]
    assert [part.rollout.groups.tolist() for part in parts] == [[1], [1], [0], [0]]


def test_minibatches_are_equal_parts_of_whole_groups() -> None:
    trajectory = _trajectory([1] * 8, [1] * 8, group_size=2)
    answers = [minibatch(trajectory, number, of=2).rollout.answers for number in (0, 1)]
    assert answers == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]


@pytest.mark.parametrize("n", [3, 8, 0])
def test_minibatches_refuse_to_cut_groups(n: int) -> None:
    trajectory = _trajectory([1] * 8, [1] * 8, group_size=2)
    with pytest.raises(ConfigError, match=f"got {n}, expected a divisor of the 4 prompts"):
        minibatch(trajectory, 0, of=n)

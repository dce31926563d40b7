import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.torchtune_grpo.builders import make_rewards, make_rollout
from tests.torchtune_grpo.distributed_helpers import run_ranks
from torchtune_grpo.advantages import (
    BatchStd,
    GroupMean,
    GroupZScore,
    KLPenalizedReward,
    LeaveOneOut,
    zero_variance_groups,
)
from torchtune_grpo.config import ConfigError
from torchtune_grpo.types import AdvantageFn

NAN = math.nan
COMPONENTS = [GroupZScore(), GroupMean(), LeaveOneOut(), BatchStd()]


def _rows(component: AdvantageFn, total: list[float], group_size: int) -> list[float]:
    """The advantage at the first token of each row."""
    rollout = make_rollout([1] * len(total), group_size=group_size)
    return component(make_rewards(total), rollout, rollout.old_logprobs)[:, 0].tolist()


@pytest.mark.parametrize(("ddof", "size"), [(1, 0.866), (0, 1.0)])
def test_group_zscore_by_hand(ddof: int, size: float) -> None:
    expected = pytest.approx([size, -size, -size, size], abs=1e-4)
    assert _rows(GroupZScore(ddof=ddof), [1, 0, 0, 1], 4) == expected


def test_group_mean_by_hand() -> None:
    assert _rows(GroupMean(), [1, 0, 0, 0, 3, 1, 2, 2], 4) == [0.75, -0.25, -0.25, -0.25, 1, -1, 0, 0]


def test_group_mean_is_precise_far_from_zero() -> None:
    total = [2.0**20, 2.0**20 + 1, 2.0**20 + 3]  # fp32 numbers here are 1/8 apart
    assert _rows(GroupMean(), total, 3) == pytest.approx([-4 / 3, -1 / 3, 5 / 3])


def test_leave_one_out_by_hand() -> None:
    # 1 - mean(0, 0, 0), 0 - mean(1, 0, 0); 3 - mean(1, 2), 1 - mean(3, 2), 2 - mean(3, 1)
    third = pytest.approx(-1 / 3)
    assert _rows(LeaveOneOut(), [1, 0, 0, 0], 4) == [1, third, third, third]
    assert _rows(LeaveOneOut(), [3, 1, 2], 3) == [1.5, -1.5, 0]


def test_batch_std_divides_all_groups_by_one_std() -> None:
    # centred: +-1 and +-3; population std of all four: sqrt((1 + 1 + 9 + 9) / 4) = sqrt 5
    expected = [1 / 5**0.5, -1 / 5**0.5, 3 / 5**0.5, -3 / 5**0.5]
    assert _rows(BatchStd(), [2, 0, 7, 1], 2) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("component", COMPONENTS)
def test_advantages_are_exactly_zero_without_spread(component: AdvantageFn) -> None:
    assert _rows(component, [1, 1, 0, 0], 2) == [0, 0, 0, 0]
    assert _rows(component, [1, 1, 1, 1], 4) == [0, 0, 0, 0]
    assert _rows(component, [0.35] * 7, 7) == [0] * 7


@pytest.mark.parametrize("component", COMPONENTS)
def test_advantages_are_zero_when_nothing_was_judged(component: AdvantageFn) -> None:
    assert _rows(component, [NAN, NAN], 2) == [0, 0]


@pytest.mark.parametrize("component", COMPONENTS)
def test_advantages_ignore_fp32_residue(component: AdvantageFn) -> None:
    for reward in (0.35, 1000.0, -1000.0):
        residue = torch.nextafter(torch.tensor(reward), torch.tensor(2000.0)).item()
        assert residue > reward
        assert _rows(component, [reward, residue, reward, reward], 4) == [0, 0, 0, 0]


@pytest.mark.parametrize("component", COMPONENTS)
def test_advantages_leave_out_unjudged_rows(component: AdvantageFn) -> None:
    with_nan = _rows(component, [1, NAN, 0, 0, 5, NAN, NAN, NAN, NAN, NAN, NAN, NAN], 4)
    assert with_nan[1] == 0
    assert with_nan[4:] == [0] * 8
    alone = _rows(component, [1, 0, 0], 3)
    if isinstance(component, BatchStd):  # its divisor counts the lone judged row of the second group
        alone = [value * math.sqrt(4 / 3) for value in alone]
    assert [with_nan[0], *with_nan[2:4]] == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("component", COMPONENTS)
def test_advantages_stand_at_response_tokens_only(component: AdvantageFn) -> None:
    rollout = make_rollout([3, 1, 0, 2], group_size=4, extra=1)
    advantages = component(make_rewards([1, 0, 0, 1]), rollout, rollout.old_logprobs)
    assert advantages.dtype == torch.float32
    assert torch.equal(advantages != 0, rollout.response_mask)
    assert (advantages[0, :3] == advantages[0, 0]).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=8), st.sampled_from([0, 1]))
def test_group_zscore_agrees_with_statistics_module(total: list[float], ddof: int) -> None:
    if max(total) - min(total) < 1e-3:
        return
    std = statistics.stdev(total) if ddof else statistics.pstdev(total)
    expected = [(reward - statistics.fmean(total)) / std for reward in total]
    assert _rows(GroupZScore(ddof=ddof, eps=1e-12), total, len(total)) == pytest.approx(expected, abs=1e-4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-80, 80), min_size=4, max_size=4), st.sampled_from(COMPONENTS))
def test_advantages_do_not_depend_on_a_constant_and_sum_to_zero(eighths: list[int], component) -> None:
    total = [value / 8 for value in eighths]  # exact in fp32, with the constant too
    rows = _rows(component, total, 4)
    assert sum(rows) == pytest.approx(0, abs=1e-5)
    assert _rows(component, [reward + 1 for reward in total], 4) == pytest.approx(rows, abs=1e-5)


def _batch_std_on_rank(rank: int) -> list[float]:
    return _rows(BatchStd(), [[2.0, 0.0], [7.0, 1.0, 1.0, 1.0, NAN, 0.0]][rank], 2)


def test_batch_std_is_that_of_all_ranks() -> None:
    # centred +-1 | +-3, 0, 0, and a lone judged row: squares 20 over 7 judged rows
    std = (20 / 7) ** 0.5
    first, second = run_ranks(_batch_std_on_rank)
    assert first == pytest.approx([1 / std, -1 / std], abs=1e-5)
    assert second == pytest.approx([3 / std, -3 / std, 0, 0, 0, 0], abs=1e-5)


def test_kl_penalized_reward_subtracts_the_rows_kl() -> None:
    rollout = make_rollout([2, 1], group_size=2)
    # k1 = old - ref = -2 - ref: row 0: 0.5 + 0.25, row 1: 0.5; garbage at the padding
    ref = torch.tensor([[-2.5, -2.25], [-2.5, NAN]])
    component = KLPenalizedReward(advantage=GroupMean(), coefficient=0.1)
    advantages = component(make_rewards([1, 1]), rollout, ref)
    torch.testing.assert_close(advantages, torch.tensor([[-0.0125, -0.0125], [0.0125, 0.0]]))


def test_kl_penalized_reward_uses_the_estimator_named() -> None:
    rollout = make_rollout([1, 1], group_size=2)
    ref = torch.tensor([[-2.5], [-2.0]])
    component = KLPenalizedReward(advantage=LeaveOneOut(), coefficient=1.0, estimator="k2")
    torch.testing.assert_close(component(make_rewards([0, 0]), rollout, ref), torch.tensor([[-0.125], [0.125]]))


def test_kl_penalized_reward_needs_a_reference_only_with_a_coefficient() -> None:
    inner = KLPenalizedReward(advantage=GroupMean(), coefficient=0.1)
    assert inner.needs_reference
    assert not KLPenalizedReward(advantage=GroupMean(), coefficient=0.0).needs_reference
    assert KLPenalizedReward(advantage=inner, coefficient=0.0).needs_reference
    assert not any(component.needs_reference for component in COMPONENTS)


def test_min_group_size_refuses_single_completions() -> None:
    wrapped = [KLPenalizedReward(advantage=component, coefficient=0.1) for component in COMPONENTS]
    assert {component.min_group_size for component in [*COMPONENTS, *wrapped]} == {2}


def test_zero_variance_groups_by_hand() -> None:
    total = [1, 1, 1, 0, NAN, 1, NAN, NAN, 0.35, 0.35]
    assert zero_variance_groups(make_rewards(total), 2).tolist() == [True, False, True, True, True]
    assert zero_variance_groups(make_rewards([1, NAN, 0, 1, NAN, 1]), 3).tolist() == [False, True]


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: GroupZScore(ddof=2), "ddof"),
        (lambda: GroupZScore(eps=0.0), "eps"),
        (lambda: BatchStd(eps=-1.0), "eps"),
        (lambda: KLPenalizedReward(advantage=GroupMean(), coefficient=-0.1), "coefficient"),
        (lambda: KLPenalizedReward(advantage=GroupMean(), coefficient=0.1, estimator="k9"), "estimator"),
    ],
)
def test_advantage_components_refuse_bad_values(build, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        build()

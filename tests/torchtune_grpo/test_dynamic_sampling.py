import math
from dataclasses import fields, replace

import pytest
import torch

from tests.torchtune_grpo.builders import PAD, BigramPolicy, bigram_logprobs, make_rewards, make_rollout
from tests.torchtune_grpo.distributed_helpers import run_ranks
from torchtune_grpo.config import ConfigError
from torchtune_grpo.dynamic_sampling import InformativeGroups, concat_rewards, concat_rollouts
from torchtune_grpo.types import Rewards, Rollout

DULL, SPREAD = [1.0, 1.0], [1.0, 0.0]


def _round(groups: list[list[float]], name: str, **lengths: list[int]) -> tuple[Rollout, Rewards]:
    total = [reward for group in groups for reward in group]
    rollout = make_rollout([2] * len(total), group_size=2, **lengths)
    return replace(rollout, answers=[f"{name}{row // 2}" for row in range(len(total))]), make_rewards(total)


def _fill(pool: InformativeGroups, rounds: list[list[list[float]]]) -> int:
    """Adds rounds a, b, c, ... while the pool wants more; returns how many."""
    used = 0
    while not pool.full:
        pool.add(*_round(rounds[used], "abc"[used]))
        used += 1
    return used


def _groups(pool: InformativeGroups) -> list[str]:
    rollout, _ = pool.result(PAD)
    assert rollout.answers[::2] == rollout.answers[1::2]
    return rollout.answers[::2]


def test_informative_groups_collects_until_full() -> None:
    pool = InformativeGroups(num_groups=2, max_rounds=5)
    assert _fill(pool, [[DULL, SPREAD], [DULL, DULL], [SPREAD, SPREAD]]) == 3
    assert _groups(pool) == ["a1", "c0"]
    _, rewards = pool.result(PAD)
    assert rewards.total.tolist() == rewards.parts["answer"].tolist() == [1, 0, 1, 0]
    assert rewards.success.tolist() == [1, 0, 1, 0]


def test_informative_groups_fills_up_when_the_bound_is_hit() -> None:
    pool = InformativeGroups(num_groups=3, max_rounds=2)
    assert _fill(pool, [[DULL, DULL, DULL], [DULL, SPREAD, DULL], [SPREAD] * 3]) == 2
    assert _groups(pool) == ["a0", "a1", "b1"]


def test_informative_groups_takes_unjudged_groups_for_dull() -> None:
    pool = InformativeGroups(num_groups=1, max_rounds=2)
    assert _fill(pool, [[[1.0, math.nan]], [SPREAD]]) == 2
    assert _groups(pool) == ["b0"]


def test_informative_groups_of_one_round_is_plain_sampling() -> None:
    pool = InformativeGroups(num_groups=3, max_rounds=1)
    rollout, rewards = _round([DULL, SPREAD, DULL], "a", prompt_lengths=[1, 1, 3, 3, 2, 2])
    pool.add(rollout, rewards)
    assert pool.full
    got, got_rewards = pool.result(PAD)
    for field in fields(Rollout):
        left, right = getattr(got, field.name), getattr(rollout, field.name)
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
    assert torch.equal(got_rewards.total, rewards.total)


def test_informative_groups_metrics_count_all_that_was_sampled() -> None:
    pool = InformativeGroups(num_groups=2, max_rounds=3)
    _fill(pool, [[DULL, SPREAD], [DULL, DULL], [SPREAD, SPREAD]])
    metrics = {name: (total.item(), count.item()) for name, (total, count) in pool.metrics.items()}
    assert metrics == {"zero_variance": (3, 6), "sampling_rounds": (3, 1)}


def test_informative_groups_refuses_no_round_and_too_few_groups() -> None:
    with pytest.raises(ConfigError, match="max_sampling_rounds"):
        InformativeGroups(num_groups=1, max_rounds=0)
    pool = InformativeGroups(num_groups=2, max_rounds=1)
    pool.add(*_round([SPREAD], "a"))
    with pytest.raises(ConfigError, match="1 groups were sampled, expected 2"):
        pool.result(PAD)


def _rounds_on_rank(rank: int) -> tuple[int, list[str]]:
    # Rank 0 has enough at once, rank 1 after the second round.
    rounds = [[[SPREAD], [DULL], [DULL]], [[DULL], [SPREAD], [DULL]]][rank]
    pool = InformativeGroups(num_groups=1, max_rounds=3)
    return _fill(pool, rounds), _groups(pool)


def test_informative_groups_takes_equally_many_rounds_on_every_rank() -> None:
    assert run_ranks(_rounds_on_rank) == [(2, ["a0"]), (2, ["b0"])]


def test_concat_rollouts_pads_prompts_left_and_completions_right() -> None:
    narrow = make_rollout([2, 1], prompt_lengths=[2, 1])
    wide = make_rollout([3, 5], prompt_lengths=[4, 3], seed=5)
    both = concat_rollouts([narrow, wide], pad_id=PAD)
    assert both.tokens.shape == (4, 4 + 5)
    assert both.prompt_width == 4
    a, b = narrow.tokens.tolist()
    assert both.tokens[:2].tolist() == [[PAD, PAD, *a, PAD, PAD, PAD], [PAD, PAD, *b, PAD, PAD, PAD]]
    assert both.positions[:2].tolist() == [[0, 0, 0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 2, 3, 4, 5]]
    assert both.response_mask[:2].tolist() == [[True] * 2 + [False] * 3, [True] + [False] * 4]
    assert both.old_logprobs[:2].tolist() == [[-2, -2, 0, 0, 0], [-2, 0, 0, 0, 0]]
    assert torch.equal(both.tokens[2:], wide.tokens)
    assert torch.equal(both.positions[2:], wide.positions)
    assert both.prompt_lengths.tolist() == [2, 1, 4, 3]
    assert both.response_lengths.tolist() == [2, 1, 3, 5]
    assert both.answers == ["0", "1", "0", "1"]
    assert both.groups.tolist() == [0, 1, 2, 3]
    assert len(both.truncated) == len(both.source) == 4
    model = BigramPolicy()
    assert torch.equal(bigram_logprobs(model, both)[:2, :2], bigram_logprobs(model, narrow))


def test_concat_rewards_keeps_order() -> None:
    rewards = concat_rewards([make_rewards([1, 0]), make_rewards([2])])
    assert rewards.total.tolist() == rewards.parts["answer"].tolist() == [1, 0, 2]
    assert rewards.success.tolist() == [1, 0, 1]

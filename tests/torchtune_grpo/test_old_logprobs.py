import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.torchtune_grpo.builders import BigramLogprobs, BigramPolicy, bigram_logprobs, make_rollout
from tests.torchtune_grpo.distributed_helpers import run_ranks
from torchtune_grpo.config import ConfigError
from torchtune_grpo.old_logprobs import RecomputedLogprobs, SampledLogprobs, score
from torchtune_grpo.types import Rollout


def _rollout() -> Rollout:
    return make_rollout([3, 1, 0, 4, 2], prompt_lengths=[1, 3, 2, 2, 4], extra=2)


def _shifted(model: nn.Module, rollout: Rollout, shift: float) -> Rollout:
    """A rollout whose sampler reported log-probabilities ``shift`` nats below the model's."""
    exact = bigram_logprobs(model, rollout).detach()
    return replace(rollout, old_logprobs=(exact - shift).masked_fill(~rollout.response_mask, 0.0))


def test_sampled_logprobs_change_nothing() -> None:
    rollout = _rollout()
    kept, weights = SampledLogprobs()(BigramPolicy(dtype=torch.float32), rollout, bigram_logprobs, max_tokens=8)
    assert kept is rollout
    assert torch.equal(weights, torch.ones_like(rollout.old_logprobs))


@pytest.mark.parametrize(
    ("cap", "shift", "expected"),
    [(2.0, 0.5, math.exp(0.5)), (2.0, 1.0, 2.0), (2.0, -1.0, math.exp(-1)), (None, 1.0, 1.0)],
)
def test_recomputed_logprobs_weigh_by_truncated_ratio(cap: float | None, shift: float, expected: float) -> None:
    model = BigramPolicy(dtype=torch.float32)
    rollout = _shifted(model, _rollout(), shift)
    recompute = RecomputedLogprobs(importance_cap=cap)
    recomputed, weights = recompute(model, rollout, bigram_logprobs, max_tokens=8)
    torch.testing.assert_close(recomputed.old_logprobs, bigram_logprobs(model, rollout).detach())
    assert recomputed.tokens is rollout.tokens
    hand = torch.full_like(weights, expected).masked_fill(~rollout.response_mask, 1.0)
    torch.testing.assert_close(weights, hand)
    assert not weights.requires_grad


def test_recomputed_logprobs_refuse_a_cap_of_zero() -> None:
    with pytest.raises(ConfigError, match="importance_cap"):
        RecomputedLogprobs(importance_cap=0.0)


@pytest.mark.parametrize("max_tokens", [1, 12, 1000])
def test_score_does_not_depend_on_micro_batches(max_tokens: int) -> None:
    model, rollout = BigramPolicy(dtype=torch.float32), _rollout()
    whole = bigram_logprobs(model, rollout).detach()
    scored = score(model, rollout, bigram_logprobs, max_tokens=max_tokens)
    assert scored.dtype == torch.float32
    torch.testing.assert_close(scored, whole)


def test_score_is_in_eval_mode_without_gradient_and_within_budget() -> None:
    seen = []

    def watch(model: nn.Module, rollout: Rollout) -> None:
        seen.append((model.training, torch.is_grad_enabled(), rollout.tokens.numel()))

    spy = BigramLogprobs(watch)
    model = BigramPolicy(dtype=torch.float32)
    score(model, _rollout(), spy, max_tokens=14)
    assert len(seen) > 1
    assert all(not training and not grad and cost <= 14 for training, grad, cost in seen)
    assert model.training
    score(model.eval(), _rollout(), spy, max_tokens=14)
    assert not model.training


def test_score_restores_the_mode_after_an_error() -> None:
    def fails(model: nn.Module, rollout: Rollout) -> None:
        raise RuntimeError("no memory")

    model = BigramPolicy(dtype=torch.float32)
    with pytest.raises(RuntimeError, match="no memory"):
        score(model, _rollout(), BigramLogprobs(fails), max_tokens=8)
    assert model.training


def _forwards_on_rank(rank: int) -> tuple[int, bool]:
    rollout = _rollout() if rank else make_rollout([1])
    model, calls = BigramPolicy(dtype=torch.float32), []
    scored = score(model, rollout, BigramLogprobs(lambda model, part: calls.append(1)), max_tokens=6)
    return len(calls), torch.equal(scored, bigram_logprobs(model, rollout))


def test_score_makes_equally_many_forwards_on_every_rank() -> None:
    (few, few_right), (many, many_right) = run_ranks(_forwards_on_rank)
    assert few == many > 1
    assert few_right and many_right

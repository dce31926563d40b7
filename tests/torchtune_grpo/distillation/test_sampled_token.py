"""The sampled-token objective: an advantage by hand, and its expectation is the reverse KL."""

from dataclasses import replace

import pytest
import torch

from tests.torchtune_grpo.builders import BigramPolicy, bigram_logprobs, make_rewards, make_rollout
from torchtune_grpo.config import ConfigError
from torchtune_grpo.distillation import FullVocabulary, GivenCompletions, Objective, SampledToken, check_components
from torchtune_grpo.distillation.payloads import DistillationTrajectory
from torchtune_grpo.generation import Generate
from torchtune_grpo.logprobs import DenseLogprobs
from torchtune_grpo.losses import CISPO


def _rollout():
    rollout = make_rollout([2, 1], group_size=2)
    return replace(rollout, old_logprobs=torch.tensor([[-1.0, -2.0], [-0.5, torch.nan]]))


def test_advantage_is_the_teachers_gain_on_the_sampled_token() -> None:
    teacher = torch.tensor([[-0.25, -5.0], [-0.75, torch.nan]])
    advantages = SampledToken().advantages(make_rewards([1, 0]), _rollout(), teacher)
    assert torch.equal(advantages, torch.tensor([[0.75, -3.0], [-0.25, 0.0]]))


def test_rewards_are_mixed_in_by_their_coefficient() -> None:
    teacher = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]])
    objective = SampledToken(reward_coefficient=2.0)
    advantages = objective.advantages(make_rewards([1, 0]), _rollout(), teacher)
    # Two rewards 1 and 0: a z-score of +-1 / sqrt(2), twice.
    torch.testing.assert_close(advantages, torch.tensor([[1.41421, 1.41421], [-1.41421, 0.0]]), atol=1e-4, rtol=0)
    assert objective.min_group_size == 2 and SampledToken().min_group_size == 1


def test_loss_is_the_policy_gradient_on_that_advantage() -> None:
    rollout = make_rollout([3, 1, 2])
    model = BigramPolicy(dtype=torch.float32)
    rollout = replace(rollout, old_logprobs=bigram_logprobs(model, rollout).detach())
    teacher = torch.where(rollout.response_mask, torch.full(rollout.response_mask.shape, -1.5), 0.0)
    objective = SampledToken(loss=CISPO())
    trajectory = DistillationTrajectory(
        rollout=rollout,
        advantages=objective.advantages(make_rewards([0, 0, 0]), rollout, teacher),
        ref_logprobs=teacher,
        token_weights=rollout.response_mask / 6,
        teacher_index=None,
        payload=[torch.empty(0)] * 3,
    )
    out = objective(model, trajectory, bigram_logprobs, None)
    out.loss.backward()
    gradient = model.weight.grad.clone()
    model.weight.grad = None
    # On the policy's own samples the gradient is E[(log pi - log pi_T) grad log pi].
    logprobs = bigram_logprobs(model, rollout)
    ((logprobs - teacher).detach() * logprobs).sum().div(6).backward()
    torch.testing.assert_close(gradient, model.weight.grad)
    assert {"ratio", "kl_old", "loss"} <= set(out.metrics) and not out.minima


@pytest.mark.parametrize(
    ("generate", "objective", "message"),
    [
        ({"top_k": 5}, SampledToken(), "^generate: got given completions, or greedy"),
        ({"temperature": 0.0}, FullVocabulary(), "^generate.temperature: got 0"),
        ({"group_size": 1}, SampledToken(reward_coefficient=0.1), "^generate.group_size: got 1, expected at least 2"),
    ],
)
def test_completions_that_an_objective_cannot_learn_from_are_refused(
    generate: dict[str, float], objective: Objective, message: str
) -> None:
    sampling = {"group_size": 2, "max_new_tokens": 4}
    with pytest.raises(ConfigError, match=message):
        check_components(Generate(**(sampling | generate)), DenseLogprobs(), objective)


@pytest.mark.parametrize("objective", [SampledToken(), FullVocabulary()])
def test_given_completions_are_for_the_full_vocabulary_only(objective: Objective) -> None:
    check_components(Generate(group_size=1, max_new_tokens=4), DenseLogprobs(), objective)
    check_components(Generate(group_size=1, max_new_tokens=4, top_k=5), DenseLogprobs(), FullVocabulary())
    given = GivenCompletions(max_new_tokens=4)
    if objective.needs_on_policy:
        with pytest.raises(ConfigError, match="given completions"):
            check_components(given, DenseLogprobs(), objective)
    else:
        check_components(given, DenseLogprobs(), objective)


def test_logprobs_without_a_head_to_replace_are_refused() -> None:
    with pytest.raises(ConfigError, match="^logprobs: got BigramLogprobs, expected a component with a `head`"):
        check_components(Generate(group_size=1, max_new_tokens=4), bigram_logprobs, SampledToken())


def test_negative_reward_coefficient_is_refused() -> None:
    with pytest.raises(ConfigError, match="reward_coefficient: got -0.1"):
        SampledToken(reward_coefficient=-0.1)

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from tests.torchtune_grpo.builders import BigramPolicy, bigram_logprobs, make_rollout, make_trajectory
from torchtune_grpo.config import ConfigError
from torchtune_grpo.losses import CISPO, GSPO, ClippedSurrogate, KLToReference, SumLoss
from torchtune_grpo.normalization import SequenceMean, TokenMean, normalize
from torchtune_grpo.types import LossFn, Trajectory

KL = KLToReference(coefficient=0.1)
LOSSES = [
    ClippedSurrogate(),
    ClippedSurrogate(dual_clip=3.0),
    GSPO(clip_low=0.2, clip_high=0.2),
    CISPO(),
    KL,
    SumLoss(terms=[ClippedSurrogate(), KL]),
]


def _tokens(ratios: list[float], advantage: float) -> tuple[Tensor, Trajectory]:
    """One row whose tokens have these ratios, in float64, with weight 1."""
    rollout = make_rollout([len(ratios)])
    old = rollout.old_logprobs.double()
    trajectory = make_trajectory(replace(rollout, old_logprobs=old), [advantage])
    logprobs = old + torch.tensor([ratios], dtype=torch.float64).log()
    return logprobs.requires_grad_(), trajectory


def _objectives(loss_fn: LossFn, ratios: list[float], advantage: float) -> tuple[list[float], list[float]]:
    """Objective of each token alone, and its gradient with respect to the token's logprob."""
    values, gradients = [], []
    for ratio in ratios:
        logprobs, trajectory = _tokens([ratio], advantage)
        loss = loss_fn(logprobs, trajectory).loss
        loss.backward()
        values.append(-loss.item())
        gradients.append(-logprobs.grad.item())
    return values, gradients


def _mean(pair: tuple[Tensor, Tensor]) -> float:
    return (pair[0] / pair[1]).item()


def _random(seed: int = 0, spread: float = 0.3) -> tuple[Tensor, Trajectory]:
    """Four rows of unequal length, one empty, in float64, normalised by ``SequenceMean``."""
    generator = torch.Generator().manual_seed(seed)
    rollout = make_rollout([3, 5, 0, 2], extra=1)
    mask = rollout.response_mask
    old, step, step_ref = torch.randn(3, *mask.shape, generator=generator, dtype=torch.float64) * mask
    rollout = replace(rollout, old_logprobs=old - 2.0 * mask)
    trajectory = make_trajectory(rollout, [1.0, -0.7, 2.0, 0.4], ref_logprobs=rollout.old_logprobs + 0.5 * step_ref)
    logprobs = (rollout.old_logprobs + spread * step).requires_grad_()
    return logprobs, normalize(trajectory, SequenceMean(), world_size_for_averaging=1)


@pytest.mark.parametrize(
    ("loss_fn", "advantage", "ratios", "values", "gradients"),
    [
        (ClippedSurrogate(), 1.0, [1.1, 0.9, 1.5, 0.5], [1.1, 0.9, 1.2, 0.5], [1.1, 0.9, 0, 0.5]),
        (ClippedSurrogate(), -2.0, [1.1, 0.9, 1.5, 0.5], [-2.2, -1.8, -3, -1.6], [-2.2, -1.8, -3, 0]),
        (ClippedSurrogate(clip_high=0.28), 1.0, [1.25, 1.5], [1.25, 1.28], [1.25, 0]),
        (ClippedSurrogate(clip_low=0.4), -1.0, [0.7, 0.5], [-0.7, -0.6], [-0.7, 0]),
        (ClippedSurrogate(dual_clip=3.0), -1.0, [2, 5, 0.5], [-2, -3, -0.8], [-2, 0, 0]),
        (ClippedSurrogate(dual_clip=3.0), 1.0, [0.5, 5], [0.5, 1.2], [0.5, 0]),
        (GSPO(clip_low=0.1, clip_high=0.2), 1.0, [1.1, 1.5, 0.5], [1.1, 1.2, 0.5], [1.1, 0, 0.5]),
        (GSPO(clip_low=0.1, clip_high=0.2), -1.0, [1.1, 1.5, 0.5], [-1.1, -1.5, -0.9], [-1.1, -1.5, 0]),
    ],
)
def test_surrogate_by_hand(loss_fn, advantage, ratios, values, gradients) -> None:
    got_values, got_gradients = _objectives(loss_fn, ratios, advantage)
    assert got_values == pytest.approx(values)
    assert got_gradients == pytest.approx(gradients)


def test_clipped_surrogate_clips_tokens_not_sequences() -> None:
    logprobs, trajectory = _tokens([1.1, 0.9, 1.5], advantage=1.0)
    trajectory = normalize(trajectory, TokenMean(), world_size_for_averaging=1)
    assert ClippedSurrogate()(logprobs, trajectory).loss.item() == pytest.approx(-1.06667, abs=1e-5)


@pytest.mark.parametrize("loss_fn", [ClippedSurrogate(), ClippedSurrogate(dual_clip=1.5), KL])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_loss_gradient_agrees_with_finite_differences(loss_fn: LossFn, estimator: str) -> None:
    logprobs, trajectory = _random(spread=0.6)
    if isinstance(loss_fn, KLToReference):
        loss_fn = replace(loss_fn, estimator=estimator)
    assert torch.autograd.gradcheck(lambda x: loss_fn(x, trajectory).loss, logprobs)


def test_gspo_is_the_papers_sequence_objective() -> None:
    logprobs, trajectory = _random(spread=0.6)
    out = GSPO(clip_low=0.2, clip_high=0.2)(logprobs, trajectory)
    out.loss.backward()
    value, gradient = 0.0, torch.zeros_like(logprobs)
    clipped = 0
    for row, length in enumerate([3, 5, 0, 2]):
        if length == 0:
            continue
        old = trajectory.rollout.old_logprobs[row, :length]
        ratio = math.exp((logprobs[row, :length] - old).sum().item() / length)
        advantage = trajectory.advantages[row, 0].item()
        bounded = min(max(ratio, 0.8), 1.2)
        value += min(ratio * advantage, bounded * advantage) / 3
        if ratio * advantage <= bounded * advantage:
            gradient[row, :length] = -ratio * advantage / length / 3
        else:
            clipped += 1
    assert 0 < clipped < 3  # the case must show both branches
    assert out.loss.item() == pytest.approx(-value)
    torch.testing.assert_close(logprobs.grad, gradient)


def test_cispo_by_hand() -> None:
    # weight sg(clip(ratio, 0.8, 1.5)) times A times logprob: no token's gradient is cut off
    loss_fn = CISPO(clip_low=0.2, clip_high=0.5)
    values, gradients = _objectives(loss_fn, [1.1, 0.5, 4.0], advantage=-2.0)
    logprob = [-2 + math.log(ratio) for ratio in (1.1, 0.5, 4.0)]
    weights = [1.1, 0.8, 1.5]
    assert gradients == pytest.approx([-2 * weight for weight in weights])
    assert values == pytest.approx([-2 * w * x for w, x in zip(weights, logprob, strict=True)])


def test_cispo_has_no_lower_bound_by_default() -> None:
    _, gradients = _objectives(CISPO(), [0.01, 7.0], advantage=1.0)
    assert gradients == pytest.approx([0.01, 5.0])


def test_kl_to_reference_by_hand() -> None:
    logprobs, trajectory = _tokens([math.exp(0.5)], advantage=1.0)  # logprob -1.5, reference -2
    out = KLToReference(coefficient=0.1)(logprobs, trajectory)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.010653, abs=1e-6)
    assert _mean(out.metrics["kl_ref"]) == pytest.approx(0.10653, abs=1e-5)
    assert logprobs.grad.item() == pytest.approx(0.1 * (1 - math.exp(-0.5)))


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_loss_on_policy_has_ratio_one(loss_fn: LossFn) -> None:
    logprobs, trajectory = _random(spread=0.0)
    metrics = loss_fn(logprobs, trajectory).metrics
    if "ratio" in metrics:
        assert _mean(metrics["ratio"]) == 1
        assert _mean(metrics["kl_old"]) == 0
        assert _mean(metrics["clip_low"]) == _mean(metrics["clip_high"]) == 0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_loss_ignores_padding(loss_fn: LossFn, garbage: float) -> None:
    logprobs, clean = _random()
    expected = loss_fn(logprobs, clean)
    (gradient,) = torch.autograd.grad(expected.loss, logprobs)

    def spoil(values: Tensor) -> Tensor:
        return values.detach().masked_fill(~clean.rollout.response_mask, garbage)

    rollout = replace(clean.rollout, old_logprobs=spoil(clean.rollout.old_logprobs))
    tensors = {f.name: spoil(getattr(clean, f.name)) for f in fields(clean) if f.name != "rollout"}
    spoilt = spoil(logprobs).requires_grad_()
    out = loss_fn(spoilt, Trajectory(rollout=rollout, **tensors))
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(torch.autograd.grad(out.loss, spoilt)[0], gradient)
    torch.testing.assert_close(dict(out.metrics), dict(expected.metrics))


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_loss_without_trained_token_is_zero(loss_fn: LossFn) -> None:
    logprobs, trajectory = _random()
    out = loss_fn(logprobs, replace(trajectory, token_weights=torch.zeros_like(logprobs)))
    out.loss.backward()
    assert out.loss.item() == 0
    assert torch.equal(logprobs.grad, torch.zeros_like(logprobs))
    assert all(total == count == 0 for total, count in out.metrics.values())


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_loss_with_empty_responses_is_finite(loss_fn: LossFn) -> None:
    trajectory = make_trajectory(make_rollout([0, 0]), [1.0, -1.0])
    out = loss_fn(torch.zeros(2, 1, requires_grad=True), trajectory)
    assert out.loss.item() == 0
    assert out.metrics.keys() == loss_fn(*_random()).metrics.keys()


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("logprob", [-1000.0, 0.0])
def test_loss_is_finite_for_extreme_ratios(loss_fn: LossFn, logprob: float) -> None:
    rollout = make_rollout([2])
    rollout = replace(rollout, old_logprobs=torch.tensor([[-500.0, -500.0]]))
    logprobs = torch.full((1, 2), logprob, requires_grad=True)
    loss = loss_fn(logprobs, make_trajectory(rollout, [-1.0])).loss
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad.isfinite().all()


def test_metrics_are_sums_over_trained_tokens() -> None:
    rollout = make_rollout([3, 3])
    trajectory = make_trajectory(rollout, [1.0, -1.0])
    weights = torch.tensor([[0.5, 0.5, 0.5], [0.25, 0.25, 0.0]])  # the last token is not trained
    logprobs = rollout.old_logprobs + torch.tensor([[1.1, 1.5, 0.5], [0.5, 1.5, 7.0]]).log()
    out = ClippedSurrogate()(logprobs, replace(trajectory, token_weights=weights))
    metrics = {name: (total.item(), count.item()) for name, (total, count) in out.metrics.items()}
    kl_old = sum(r - 1 - math.log(r) for r in (1.1, 1.5, 0.5, 0.5, 1.5))
    loss = -(0.5 * (1.1 + 1.2 + 0.5) + 0.25 * (-0.8 - 1.5))
    assert metrics == {
        "loss": pytest.approx((loss, 2.0)),
        "ratio": pytest.approx((5.1, 5)),
        "clip_low": (1, 5),  # 0.5 in the row with A < 0
        "clip_high": (1, 5),  # 1.5 in the row with A > 0
        "kl_old": pytest.approx((kl_old, 5)),
    }


def test_cispo_metrics_count_tokens_at_either_bound() -> None:
    logprobs, trajectory = _tokens([0.5, 0.9, 1.4, 2.0], advantage=1.0)
    metrics = CISPO(clip_low=0.2, clip_high=0.5)(logprobs, trajectory).metrics
    assert _mean(metrics["clip_low"]) == _mean(metrics["clip_high"]) == 0.25


def test_gspo_metrics_are_of_the_sequence_ratio() -> None:
    logprobs, trajectory = _tokens([4.0, 1.0], advantage=1.0)
    metrics = GSPO(clip_low=0.2, clip_high=0.5)(logprobs, trajectory).metrics
    assert _mean(metrics["ratio"]) == pytest.approx(2.0)
    assert _mean(metrics["clip_high"]) == 1


def test_metrics_are_detached() -> None:
    for loss_fn in LOSSES:
        for pair in loss_fn(*_random()).metrics.values():
            assert not any(value.requires_grad for value in pair)


def test_sum_loss_adds_terms_and_unites_metrics() -> None:
    logprobs, trajectory = _random()
    surrogate, kl = ClippedSurrogate()(logprobs, trajectory), KL(logprobs, trajectory)
    out = SumLoss(terms=[ClippedSurrogate(), KL])(logprobs, trajectory)
    torch.testing.assert_close(out.loss, surrogate.loss + kl.loss)
    assert out.metrics.keys() == surrogate.metrics.keys() | {"kl_ref"}
    torch.testing.assert_close(out.metrics["loss"][0], (surrogate.loss + kl.loss).detach())


def test_needs_reference_follows_the_coefficient() -> None:
    free = KLToReference(coefficient=0.0)
    assert KL.needs_reference
    assert not free.needs_reference
    assert SumLoss(terms=[ClippedSurrogate(), KL]).needs_reference
    assert not SumLoss(terms=[ClippedSurrogate(), free]).needs_reference
    assert not any(loss_fn.needs_reference for loss_fn in (ClippedSurrogate(), GSPO(), CISPO()))


def test_kl_to_reference_without_coefficient_is_silent() -> None:
    out = KLToReference(coefficient=0.0)(*_random())
    assert out.loss.item() == 0
    assert "kl_ref" not in out.metrics


def test_clipping_starts_on_the_second_update_of_a_rollout() -> None:
    model = BigramPolicy()
    rollout = make_rollout([4, 3])
    rollout = replace(rollout, old_logprobs=bigram_logprobs(model, rollout).detach())
    trajectory = make_trajectory(rollout, [1.0, -1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    shares = []
    for _ in range(2):
        out = ClippedSurrogate()(bigram_logprobs(model, rollout), trajectory)
        shares.append(_mean(out.metrics["clip_low"]) + _mean(out.metrics["clip_high"]))
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    assert shares[0] == 0
    assert shares[1] > 0


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: ClippedSurrogate(clip_low=-0.1), "clip_low"),
        (lambda: GSPO(clip_low=1.1), "clip_low"),
        (lambda: CISPO(clip_high=-0.1), "clip_high"),
        (lambda: ClippedSurrogate(dual_clip=1.0), "dual_clip"),
        (lambda: KLToReference(coefficient=-1.0), "coefficient"),
        (lambda: KLToReference(coefficient=1.0, estimator="kl"), "estimator"),
        (lambda: SumLoss(terms=[]), "terms"),
    ],
)
def test_loss_components_refuse_bad_values(build, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        build()

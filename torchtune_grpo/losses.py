"""Policy losses: components that turn log-probabilities and a trajectory into a weighted sum over tokens.

``loss = -(token_weights * objective).sum()`` over the local response tokens, without any mean:
``token_weights`` carry the whole normalisation (``torchtune_grpo.normalization``). What stands outside the
response mask, NaN and inf included, touches neither values nor gradients. A(t) is the advantage, log-ratio =
logprob - old_logprob, clamped to +-20 nats before ``exp`` (a token beyond carries no gradient through its
ratio). No loss makes a collective.

Metrics are local, detached (sum, count) pairs over the trained tokens, those of positive weight; a copy of a
micro-batch with weight 0 adds nothing. Which keys there are depends on the config alone, so all ranks agree:
``loss`` (weighted sum, sum of weights, both over the number of ranks), ``ratio``, ``clip_low`` and ``clip_high``
(shares of tokens at a bound), ``kl_old`` (k3 estimate of KL(sampling policy || current policy)) and ``kl_ref``, nats a
token.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchtune_grpo.collectives import world_size
from torchtune_grpo.config import ConfigError
from torchtune_grpo.kl import LOG_RATIO_BOUND, check_coefficient, check_estimator, kl_estimate
from torchtune_grpo.types import LossFn, LossOutput, Metrics, Trajectory, masked_sum

_Pairs = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class ClippedSurrogate:
    """min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) at each token.

    PPO (Schulman et al., arXiv 1707.06347, eq. 7) as used by GRPO; ``clip_high`` above ``clip_low`` is DAPO's
    clip-higher (arXiv 2503.14476, eq. 10). ``dual_clip`` c > 1 bounds the objective of a token with A < 0
    from below by c * A (Ye et al., arXiv 1912.09729, eq. 5), so that one token that became far more likely
    cannot take over. ``clip_low`` and ``clip_high`` of the metrics are the shares of tokens whose gradient
    the bound cuts off.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    needs_reference: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_clips(self.clip_low, self.clip_high)
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip: got {self.dual_clip}, expected > 1, or null for none")

    def __call__(self, logprobs: Tensor, trajectory: Trajectory) -> LossOutput:
        log_ratio, advantages = _log_ratio(logprobs, trajectory), _advantages(trajectory)
        ratio = log_ratio.exp()
        objective = _clip(ratio, advantages, self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            floor = self.dual_clip * advantages
            objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
        metrics = _policy_metrics(log_ratio, ratio, trajectory)
        metrics |= _cut_off(ratio, trajectory, self.clip_low, self.clip_high)
        return _output(objective, trajectory, metrics)


@dataclass(frozen=True, kw_only=True)
class GSPO:
    """The clipped surrogate with one ratio a sequence: s = exp(mean over the response of the log-ratios).

    Zheng et al., arXiv 2507.18071, in its token form (eq. 14): the value at each token is that of the
    sequence, the gradient s * A * grad logprob(t), and a clipped sequence has none. With ``SequenceMean``
    this is the paper's objective (eq. 5). The default bounds are the paper's: s is a geometric mean, so it
    moves far less than a token's ratio.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    needs_reference: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_clips(self.clip_low, self.clip_high)

    def __call__(self, logprobs: Tensor, trajectory: Trajectory) -> LossOutput:
        log_ratio, advantages = _log_ratio(logprobs, trajectory), _advantages(trajectory)
        lengths = trajectory.rollout.response_lengths.clamp(min=1).unsqueeze(1)
        sequence = (log_ratio.sum(dim=1, keepdim=True) / lengths).detach()
        # Value exp(sequence) at every token; the bracket is 0 and only carries each token's own gradient.
        ratio = (sequence + (log_ratio - log_ratio.detach())).exp()
        objective = _clip(ratio, advantages, self.clip_low, self.clip_high)
        metrics = _policy_metrics(log_ratio, ratio, trajectory)
        metrics |= _cut_off(ratio, trajectory, self.clip_low, self.clip_high)
        return _output(objective, trajectory, metrics)


@dataclass(frozen=True, kw_only=True)
class CISPO:
    """sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprob: REINFORCE with a bounded importance weight.

    MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; sg stops the gradient: no token's gradient is cut off, only its
    weight is bounded. By default there is no lower bound, as in the paper, and the weight is at most 5. The
    value of the objective means little; its gradient is what counts. ``clip_low`` and ``clip_high`` of the
    metrics are the shares of tokens at a bound.
    """

    clip_low: float = 1.0
    clip_high: float = 4.0
    needs_reference: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_clips(self.clip_low, self.clip_high)

    def __call__(self, logprobs: Tensor, trajectory: Trajectory) -> LossOutput:
        log_ratio = _log_ratio(logprobs, trajectory)
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        objective = weight * _advantages(trajectory) * _in_response(logprobs, trajectory)
        metrics = _policy_metrics(log_ratio, ratio, trajectory) | {
            "clip_low": _mean(ratio < 1 - self.clip_low, trajectory),
            "clip_high": _mean(ratio > 1 + self.clip_high, trajectory),
        }
        return _output(objective, trajectory, metrics)


@dataclass(frozen=True, kw_only=True)
class KLToReference:
    """coefficient * KL estimate to the reference at each token, a term for ``SumLoss``.

    GRPO's penalty (DeepSeekMath, eq. 3 and 4) with ``k3``; see ``torchtune_grpo.kl`` for what its gradient is
    and is not. No importance weight is applied when several updates share a rollout. It acts on every token
    of positive weight, on groups without reward spread too. Coefficient 0 asks for no reference and logs no
    ``kl_ref``.
    """

    coefficient: float
    estimator: str = "k3"

    def __post_init__(self) -> None:
        check_estimator(self.estimator)
        check_coefficient(self.coefficient)

    @property
    def needs_reference(self) -> bool:
        return self.coefficient > 0

    def __call__(self, logprobs: Tensor, trajectory: Trajectory) -> LossOutput:
        policy, reference = (
            _in_response(logprobs, trajectory),
            _in_response(trajectory.ref_logprobs, trajectory),
        )
        kl = kl_estimate(policy, reference, self.estimator)
        metrics = {"kl_ref": _mean(kl, trajectory)} if self.needs_reference else {}
        return _output(-self.coefficient * kl, trajectory, metrics)


@dataclass(frozen=True, kw_only=True)
class SumLoss:
    """The sum of several losses. Metrics are united, ``loss`` is that of the sum; of equal names the last
    stays."""

    terms: list[LossFn]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ConfigError("terms: got an empty list, expected at least one loss component")

    @property
    def needs_reference(self) -> bool:
        return any(term.needs_reference for term in self.terms)

    def __call__(self, logprobs: Tensor, trajectory: Trajectory) -> LossOutput:
        outputs = [term(logprobs, trajectory) for term in self.terms]
        loss = torch.stack([output.loss for output in outputs]).sum()
        metrics = {name: pair for output in outputs for name, pair in output.metrics.items()}
        return LossOutput(loss=loss, metrics=metrics | loss_metric(loss, trajectory))


def _in_response(values: Tensor, trajectory: Trajectory) -> Tensor:
    """``values`` with 0 outside the response. Before any arithmetic: 0 * NaN in the backward pass is NaN."""
    return torch.where(trajectory.rollout.response_mask, values, 0.0)


def _advantages(trajectory: Trajectory) -> Tensor:
    return _in_response(trajectory.advantages, trajectory)


def _log_ratio(logprobs: Tensor, trajectory: Trajectory) -> Tensor:
    old_logprobs = _in_response(trajectory.rollout.old_logprobs, trajectory)
    return (_in_response(logprobs, trajectory) - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def _output(objective: Tensor, trajectory: Trajectory, metrics: Metrics) -> LossOutput:
    loss = -(_in_response(trajectory.token_weights, trajectory) * objective).sum()
    return LossOutput(loss=loss, metrics={**metrics, **loss_metric(loss, trajectory)})


def loss_metric(loss: Tensor, trajectory: Trajectory) -> _Pairs:
    """Both parts without the factor that the weights carry, so that updates on any number of ranks count alike."""
    weights = masked_sum(trajectory.token_weights, trajectory.rollout.response_mask)
    return {"loss": (loss.detach() / world_size(), weights / world_size())}


def _policy_metrics(log_ratio: Tensor, ratio: Tensor, trajectory: Trajectory) -> _Pairs:
    return {
        "ratio": _mean(ratio, trajectory),
        "kl_old": _mean(kl_estimate(-log_ratio, torch.zeros_like(log_ratio), "k3"), trajectory),
    }


def _cut_off(ratio: Tensor, trajectory: Trajectory, low: float, high: float) -> _Pairs:
    """Shares of tokens that the advantage pushes further out past a bound."""
    advantages = _advantages(trajectory)
    return {
        "clip_low": _mean((ratio < 1 - low) & (advantages < 0), trajectory),
        "clip_high": _mean((ratio > 1 + high) & (advantages > 0), trajectory),
    }


def _mean(values: Tensor, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
    """(sum, count) of ``values`` over the trained tokens."""
    trained = trajectory.rollout.response_mask & (trajectory.token_weights > 0)
    return masked_sum(values.detach().float(), trained), trained.sum().float()


def _check_clips(low: float, high: float) -> None:
    if not 0 <= low <= 1:
        raise ConfigError(f"clip_low: got {low}, expected 0..1 (the ratio's lower bound is 1 - clip_low)")
    if high < 0:
        raise ConfigError(f"clip_high: got {high}, expected >= 0 (the ratio's upper bound is 1 + clip_high)")

"""Per-token estimates of KL(policy || reference).

Schulman, "Approximating KL divergence", 2020. With ``d = logprob - ref_logprob`` of a token that the policy
sampled:

========  =================  =====================  =============================================
name      value              value is               gradient, if the estimate stands in the loss
========  =================  =====================  =============================================
``k1``    d                  unbiased, any sign     zero on average: only noise
``k2``    d^2 / 2            biased, >= 0           that of KL(policy || reference), unbiased
``k3``    exp(-d) - 1 + d    unbiased, >= 0         that of KL(reference || policy), unbiased
========  =================  =====================  =============================================

The last column holds for tokens sampled by the very policy that is being differentiated, since a loss
differentiates the estimate and not the sampling. So "k3 in the loss" (GRPO, DeepSeekMath eq. 4) reports the
reverse KL but pulls the policy along the *forward* KL; near the reference the two agree to first order.
``k1`` belongs in the reward, where the policy gradient supplies the missing term.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torchtune_grpo.config import ConfigError

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 nats before ``exp``: e^20 = 4.9e8 squares and sums safely in fp32. A token
beyond the bound carries no gradient."""


def check_estimator(estimator: str) -> None:
    """Raises ConfigError unless ``estimator`` names one of the estimators above."""
    if estimator not in ESTIMATORS:
        raise ConfigError(f"estimator: got {estimator!r}, expected one of {', '.join(sorted(ESTIMATORS))}")


def check_coefficient(coefficient: float) -> None:
    """Raises ConfigError for a negative coefficient, which would push the policy away from its reference."""
    if coefficient < 0:
        raise ConfigError(f"coefficient: got {coefficient}, expected a KL coefficient >= 0")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Elementwise estimate in nats of KL(policy || reference), differentiable in ``logprobs``.

    Both inputs hold the log-probability of the same sampled tokens, at the same temperature; any shape.
    """
    return ESTIMATORS[estimator](logprobs - ref_logprobs)


def _k1(difference: Tensor) -> Tensor:
    return difference


def _k2(difference: Tensor) -> Tensor:
    return difference.square() / 2


def _k3(difference: Tensor) -> Tensor:
    bounded = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # expm1 keeps the digits that exp(-d) - 1 loses where policy and reference nearly agree.
    return torch.expm1(-bounded) + bounded


ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}

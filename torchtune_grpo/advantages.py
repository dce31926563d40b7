"""From rewards to advantages: components that compare a completion with its siblings.

Every component returns ``[N, R]`` fp32 on the rollout's device, a row's advantage at each of its response
tokens and 0 elsewhere. A row whose reward is NaN (it could not be judged) is left out of all statistics and
gets advantage 0. A group without spread, or with fewer than two judged rows, gets exactly 0, so no rounding
residue is ever divided by a tiny standard deviation. Statistics are float64. ``min_group_size`` lets set-up
refuse a ``group_size`` that could teach nothing.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from torchtune_grpo.collectives import all_reduce
from torchtune_grpo.config import ConfigError
from torchtune_grpo.kl import check_coefficient, check_estimator, kl_estimate
from torchtune_grpo.types import AdvantageFn, Rewards, Rollout

SPREAD_TOLERANCE = 1e-6
"""Rewards of a group that differ by no more than this, relative to the largest or to 1, count as equal: sums
of the same parts in another order differ by some fp32 roundings (6e-8 each)."""


@dataclass(frozen=True, kw_only=True)
class GroupZScore:
    """(reward - group mean) / (group std + eps). GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1.2.

    ``ddof`` 1 (default) divides the squares by the number of judged rows less one, as the common
    implementations do: rewards 1, 0, 0, 1 give +-0.866; ``ddof`` 0 gives +-1.
    """

    eps: float = 1e-6
    ddof: int = 1
    needs_reference: ClassVar[bool] = False
    min_group_size: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _check_eps(self.eps)
        if self.ddof not in (0, 1):
            raise ConfigError(f"ddof: got {self.ddof}, expected 0 (population) or 1 (sample standard deviation)")

    def __call__(self, rewards: Rewards, rollout: Rollout, ref_logprobs: Tensor) -> Tensor:
        centred, judged = _centred(rewards.total, rollout.group_size)
        squares = centred.square().sum(dim=1, keepdim=True)
        std = (squares / (judged.sum(dim=1, keepdim=True) - self.ddof).clamp(min=1)).sqrt()
        return _at_tokens(centred / (std + self.eps), rollout)


@dataclass(frozen=True, kw_only=True)
class GroupMean:
    """reward - group mean, not divided by the spread. Dr. GRPO: Liu et al., arXiv 2503.20783."""

    needs_reference: ClassVar[bool] = False
    min_group_size: ClassVar[int] = 2

    def __call__(self, rewards: Rewards, rollout: Rollout, ref_logprobs: Tensor) -> Tensor:
        centred, _ = _centred(rewards.total, rollout.group_size)
        return _at_tokens(centred, rollout)


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut:
    """reward - mean reward of the *other* judged siblings. RLOO: Ahmadian et al., arXiv 2402.14740."""

    needs_reference: ClassVar[bool] = False
    min_group_size: ClassVar[int] = 2

    def __call__(self, rewards: Rewards, rollout: Rollout, ref_logprobs: Tensor) -> Tensor:
        centred, judged = _centred(rewards.total, rollout.group_size)
        # With n judged rows, r - (sum of the others) / (n - 1) = (r - mean) * n / (n - 1).
        n = judged.sum(dim=1, keepdim=True).double()
        return _at_tokens(centred * n / (n - 1).clamp(min=1), rollout)


@dataclass(frozen=True, kw_only=True)
class BatchStd:
    """(reward - group mean) / (std over the global batch + eps), in the manner of REINFORCE++-baseline.

    Hu et al., arXiv 2501.03262: an easy or a hard prompt is not blown up by its own small spread. The
    standard deviation is that of the centred rewards of all judged rows on all ranks (ddof 0), each row
    counted once.

    Collectives: one all_reduce a call, whatever the rewards; the divisor is the same on every rank.
    """

    eps: float = 1e-6
    needs_reference: ClassVar[bool] = False
    min_group_size: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _check_eps(self.eps)

    def __call__(self, rewards: Rewards, rollout: Rollout, ref_logprobs: Tensor) -> Tensor:
        centred, judged = _centred(rewards.total, rollout.group_size)
        squares, count = all_reduce(torch.stack([centred.square().sum(), judged.sum().double()]))
        std = (squares / count.clamp(min=1)).sqrt()
        return _at_tokens(centred / (std + self.eps), rollout)


@dataclass(frozen=True, kw_only=True)
class KLPenalizedReward:
    """KL to the reference as part of the reward: total - coefficient * (the row's sum of KL estimates).

    The classic RLHF form (Ouyang et al., arXiv 2203.02155; RLOO), here summed over the completion; ``k1`` is
    its natural estimator, see ``torchtune_grpo.kl``. It compares ``rollout.old_logprobs`` with the reference,
    then hands the lowered rewards to ``advantage``. Coefficient 0 asks for no reference. A group whose judged
    rewards are all equal still gets advantages from its penalties, unless ``TrainedRows`` drops it.
    """

    advantage: AdvantageFn
    coefficient: float
    estimator: str = "k1"

    def __post_init__(self) -> None:
        check_estimator(self.estimator)
        check_coefficient(self.coefficient)

    @property
    def needs_reference(self) -> bool:
        return self.coefficient > 0 or self.advantage.needs_reference

    @property
    def min_group_size(self) -> int:
        return self.advantage.min_group_size

    def __call__(self, rewards: Rewards, rollout: Rollout, ref_logprobs: Tensor) -> Tensor:
        kl = kl_estimate(rollout.old_logprobs, ref_logprobs, self.estimator)
        row_kl = kl.masked_fill(~rollout.response_mask, 0.0).sum(dim=1)
        total = rewards.total - self.coefficient * row_kl.to(rewards.total.device)
        return self.advantage(replace(rewards, total=total), rollout, ref_logprobs)


def zero_variance_groups(rewards: Rewards, group_size: int) -> Tensor:
    """Groups that teach nothing, bool ``[B]`` on CPU: judged rewards all equal, or fewer than two of them."""
    return _without_spread(rewards.total, group_size)


def _without_spread(total: Tensor, group_size: int) -> Tensor:
    grouped = total.view(-1, group_size)
    judged = ~grouped.isnan()
    highest = grouped.masked_fill(~judged, -torch.inf).amax(dim=1)
    lowest = grouped.masked_fill(~judged, torch.inf).amin(dim=1)
    scale = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)
    # One judged row spans 0, none -inf: both count as without spread.
    return highest - lowest <= SPREAD_TOLERANCE * scale


def _check_eps(eps: float) -> None:
    if eps <= 0:
        raise ConfigError(f"eps: got {eps}, expected > 0, or a batch without spread divides by zero")


def _centred(total: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Reward - group mean, float64, 0 if unjudged or without spread; judged rows, bool; ``[B, G]``."""
    judged = ~total.view(-1, group_size).isnan()
    values = total.view(-1, group_size).double().nan_to_num(nan=0.0)
    mean = values.sum(dim=1, keepdim=True) / judged.sum(dim=1, keepdim=True).clamp(min=1)
    teaches = judged & ~_without_spread(total, group_size).unsqueeze(1)
    return (values - mean).masked_fill(~teaches, 0.0), judged


def _at_tokens(grouped: Tensor, rollout: Rollout) -> Tensor:
    """Row advantages ``[B, G]`` at the response tokens, fp32 ``[N, R]``, 0 elsewhere."""
    rows = grouped.reshape(-1, 1).to(rollout.response_mask.device, torch.float32)
    return torch.where(rollout.response_mask, rows, 0.0)

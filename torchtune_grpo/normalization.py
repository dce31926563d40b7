"""Which tokens are trained, and with what weight: the whole normalisation of the loss.

``token_weights [N, R]`` are worked out once per optimizer step from *global* counts, so a loss is a plain
weighted sum and its gradient cannot depend on the number of ranks, on how rows fall into micro-batches, or on
the order of the batch. FSDP averages gradients over the data-parallel ranks; the weights are therefore
multiplied by their number (``world_size_for_averaging``), which turns that average back into a sum.

A normaliser maps the mask of trained tokens to weights and makes one all_reduce, so every rank must call it
once per optimizer step, also a rank whose mask is all False. Without any trained token on any rank all
weights are 0.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from torchtune_grpo.advantages import zero_variance_groups
from torchtune_grpo.collectives import all_reduce
from torchtune_grpo.config import ConfigError
from torchtune_grpo.types import Rewards, Rollout, Trajectory


class Normalizer(Protocol):
    """Trained tokens, bool ``[N, R]``, to fp32 weights ``[N, R]``, 0 where untrained; one all_reduce."""

    def __call__(self, mask: Tensor, *, world_size_for_averaging: int) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class TokenMean:
    """1 / (trained tokens of all ranks): every token counts the same.

    DAPO: Yu et al., arXiv 2503.14476, eq. 12. Collectives: one all_reduce.
    """

    def __call__(self, mask: Tensor, *, world_size_for_averaging: int) -> Tensor:
        return mask.float() * (world_size_for_averaging / _global_count(mask))


@dataclass(frozen=True, kw_only=True)
class SequenceMean:
    """1 / (rows of all ranks * trained tokens of the row): every completion counts the same, however long.

    GRPO as first published: DeepSeekMath, arXiv 2402.03300, eq. 3. Rows without a trained token are not
    counted. Collectives: one all_reduce.
    """

    def __call__(self, mask: Tensor, *, world_size_for_averaging: int) -> Tensor:
        lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
        return mask.float() / lengths * (world_size_for_averaging / _global_count(mask.any(dim=1)))


@dataclass(frozen=True, kw_only=True)
class ConstantLength:
    """1 / (rows of all ranks * ``length``): no bias for or against long completions.

    Dr. GRPO: Liu et al., arXiv 2503.20783. ``length`` (tokens) is usually the limit on new tokens; it only
    scales the loss. Rows without a trained token are not counted. Collectives: one all_reduce.
    """

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"length: got {self.length}, expected a number of tokens >= 1")

    def __call__(self, mask: Tensor, *, world_size_for_averaging: int) -> Tensor:
        return mask.float() * (world_size_for_averaging / (self.length * _global_count(mask.any(dim=1))))


@dataclass(frozen=True, kw_only=True)
class TrainedRows:
    """The trained tokens, bool ``[N, R]`` on the rollout's device: the response tokens of the rows kept.

    Left out are the rows whose reward is NaN, unless ``keep_unjudged`` (for losses that need no reward); with
    ``mask_truncated`` those cut off by the length limit (DAPO's overlong filtering; their rewards still count in
    their group's statistics); with ``drop_zero_variance`` whole groups whose judged rewards are all equal. Without
    that option such groups have advantage 0, yet they stay in the normaliser's counts and a KL term of the loss still
    acts on them.
    """

    mask_truncated: bool = False
    drop_zero_variance: bool = False
    keep_unjudged: bool = False

    def __call__(self, rollout: Rollout, rewards: Rewards) -> Tensor:
        kept = ~rewards.total.isnan() | self.keep_unjudged
        if self.mask_truncated:
            kept = kept & ~rollout.truncated.to(kept.device)
        if self.drop_zero_variance:
            dull = zero_variance_groups(rewards, rollout.group_size)
            kept = kept & ~dull.repeat_interleave(rollout.group_size)
        return rollout.response_mask & kept.to(rollout.response_mask.device).unsqueeze(1)


def normalize(trajectory: Trajectory, normalizer: Normalizer, *, world_size_for_averaging: int) -> Trajectory:
    """Multiplies ``token_weights`` by the normaliser's, once per optimizer step and before micro-batching.

    Before the call ``token_weights`` are 0 at untrained tokens, elsewhere 1 or the token's importance weight;
    the importance weights take no part in the counts. Collectives: the normaliser's one all_reduce.
    """
    relative = trajectory.token_weights
    weights = normalizer(relative > 0, world_size_for_averaging=world_size_for_averaging)
    return replace(trajectory, token_weights=relative * weights)


def _global_count(mask: Tensor) -> float:
    """True entries on all ranks, at least 1 (weights of an empty mask are then 0). One all_reduce, on CPU."""
    count = all_reduce(mask.sum().to("cpu", torch.float64))
    return max(count.item(), 1.0)

"""Whose log-probabilities the ratio is taken to: those captured while sampling, or the trainer's own.

The sampler and the trainer compute the same policy with different kernels and precisions, so their
log-probabilities differ a little. Both components return the rollout to train on and importance weights
``[N, R]`` fp32 without gradient, to be multiplied into ``token_weights`` (1 where nothing is corrected).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchtune_grpo.config import ConfigError
from torchtune_grpo.microbatches import crop_rollout, plan_in_step
from torchtune_grpo.training.distributed import evaluation_mode
from torchtune_grpo.types import LogprobsFn, Rollout


@dataclass(frozen=True, kw_only=True)
class SampledLogprobs:
    """Keeps ``old_logprobs`` as captured while sampling; the ratio itself then carries the mismatch.

    No forward pass; collectives: none.
    """

    def __call__(
        self, model: nn.Module, rollout: Rollout, logprobs_fn: LogprobsFn, *, max_tokens: int
    ) -> tuple[Rollout, Tensor]:
        return rollout, torch.ones_like(rollout.old_logprobs)


@dataclass(frozen=True, kw_only=True)
class RecomputedLogprobs:
    """Replaces ``old_logprobs`` by the trainer's, and corrects for the sampler by an importance weight.

    The first update's ratio is then 1 to rounding. The weight is min(exp(recomputed - sampled),
    ``importance_cap``), truncated importance sampling (TIS): Yao et al., "Your efficient RL framework
    secretly brings you off-policy RL training", 2025. It scales all of a token's loss, a KL term too.
    ``importance_cap`` null: no correction. Collectives: those of ``score``.
    """

    importance_cap: float | None = 2.0

    def __post_init__(self) -> None:
        if self.importance_cap is not None and self.importance_cap <= 0:
            raise ConfigError(f"importance_cap: got {self.importance_cap}, expected > 0, or null for no correction")

    def __call__(
        self, model: nn.Module, rollout: Rollout, logprobs_fn: LogprobsFn, *, max_tokens: int
    ) -> tuple[Rollout, Tensor]:
        recomputed = score(model, rollout, logprobs_fn, max_tokens=max_tokens)
        if self.importance_cap is None:
            weights = torch.ones_like(recomputed)
        else:
            weights = (recomputed - rollout.old_logprobs).exp().clamp(max=self.importance_cap)
        return replace(rollout, old_logprobs=recomputed), weights


def score(model: nn.Module, rollout: Rollout, logprobs_fn: LogprobsFn, *, max_tokens: int) -> Tensor:
    """Log-probabilities of the rollout's tokens under ``model``, fp32 ``[N, R]``, 0 outside the response mask.

    Without gradient, in eval mode (the mode is restored, the parameters sharded again), in micro-batches of at most
    ``max_tokens`` (``logprobs_fn.plan``). Serves old and reference log-probabilities.

    Collectives: one all_reduce; then equally many forwards on every rank, with those that ``logprobs_fn`` and a
    sharded model make.
    """
    result = torch.zeros_like(rollout.old_logprobs)
    with evaluation_mode(model):
        for rows in plan_in_step(rollout, logprobs_fn, max_tokens):
            part = crop_rollout(rollout.rows(rows))
            width = part.response_mask.shape[1]
            result[rows.to(result.device), :width] = logprobs_fn(model, part)
    return result

"""Log-probabilities of sampled tokens under a training forward: ``LogprobsFn`` and its head.

The head only runs where a response token is predicted: the last prompt token predicts the first of them.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torchtune.modules import TransformerDecoder

from torchtune_grpo.layout import shift_left
from torchtune_grpo.microbatches import plan_whole_groups
from torchtune_grpo.models.internals import unembed_swapped
from torchtune_grpo.types import Rollout


class TargetHead(Protocol):
    """Hidden states -> log-probabilities of given tokens; the place to plug chunked or fused kernels in.

    ``hidden [T, D]``: the model's final hidden states after ``model.norm``; ``targets [T]`` int64;
    ``temperature`` > 0 divides the logits. Returns ``[T]`` fp32, in nats, differentiable in hidden and head.
    Called inside the model's forward, where ``model.output`` is unsharded. T may be 0.
    """

    def __call__(self, model: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class FullSoftmaxHead:
    """The plain head: all logits ``[T, V]`` in fp32, then log-sum-exp."""

    def __call__(self, model: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        logits = model.output(hidden).float() / temperature
        chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
        return chosen - torch.logsumexp(logits, dim=-1)


@dataclass(frozen=True, kw_only=True)
class DenseLogprobs:
    """Every row forwarded whole, its own copy of the prompt included.

    ``temperature`` is that of sampling, for the current, old and reference policy alike.
    Collectives: those of the model's forward (FSDP all-gathers), the same on every rank.
    """

    temperature: float = 1.0
    head: TargetHead = field(default_factory=FullSoftmaxHead)

    def plan(self, rollout: Rollout, max_tokens: int) -> list[Tensor]:
        """Padded whole groups, see ``plan_whole_groups``."""
        return plan_whole_groups(rollout, max_tokens)

    def __call__(self, model: TransformerDecoder, rollout: Rollout) -> Tensor:
        mask = rollout.response_mask
        starts = rollout.prompt_lengths[:, None]
        tokens = shift_left(rollout.tokens, rollout.prompt_width - rollout.prompt_lengths)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        targets = (places >= starts) & (places < starts + rollout.response_lengths[:, None])
        logprobs = target_logprobs(model, tokens, targets, self.head, self.temperature)
        return torch.zeros_like(mask, dtype=torch.float32).masked_scatter(mask, logprobs)


def target_logprobs(
    model: TransformerDecoder, tokens: Tensor, targets: Tensor, head: TargetHead, temperature: float
) -> Tensor:
    """Log-probabilities ``[T]`` of the T tokens marked in ``targets``, row after row.

    ``tokens [n, s]`` int64: rows that start at position 0, padded on the right; ``targets [n, s]`` bool, True = to be
    predicted from what stands before it (never True in the first column).
    Collectives: those of the model's forward.
    """
    rows, places = targets.nonzero(as_tuple=True)

    def unembed(hidden: Tensor) -> Tensor:
        return head(model, model.norm(hidden[rows, places - 1]), tokens[rows, places], temperature)

    with unembed_swapped(model, unembed):
        return model(tokens)

"""``SharedPrefixLogprobs``: the prompt of a group once, forward and backward, instead of once per completion."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder

from dev.packing import plan_groups
from dev.shared_prefix.attention import AttentionBackend, SDPABackend, gather_rows
from dev.shared_prefix.checks import check_length, check_model, check_rollout
from dev.shared_prefix.layout import CompactLayout, compact_layout
from torchtune_grpo.logprobs import FullSoftmaxHead, TargetHead
from torchtune_grpo.models.internals import forward_with_pattern, unembed_swapped
from torchtune_grpo.types import Rollout


@dataclass(frozen=True, kw_only=True)
class SharedPrefixLogprobs:
    """Log-probabilities equal to ``DenseLogprobs``'s, from a forward over each group's prompt once.

    A ``LogprobsFn``: the policy's forward, reference and recomputed old log-probabilities alike. Norms, projections and
    MLPs run on the compact tokens ``[1, T]`` of ``compact_layout``, attention on ``backend``, the head at the
    positions that predict a response token, row after row. ``temperature`` is that of sampling. Padding is not
    computed at all.

    Collectives: those of the model's forward (FSDP all-gathers), the same on every rank.

    Raises:
        ConfigError: a model or a rollout that this cannot compute, see ``checks``.
    """

    temperature: float = 1.0
    head: TargetHead = field(default_factory=FullSoftmaxHead)
    backend: AttentionBackend = field(default_factory=SDPABackend)

    check_model = staticmethod(check_model)  # asked at set-up, before weights load

    def plan(self, rollout: Rollout, max_tokens: int) -> list[Tensor]:
        """Micro-batches of at most ``max_tokens`` compact tokens, see ``plan_groups``: a group that does not fit is
        split, and pays for its prompt in each part. Raises ConfigError for a row longer than ``max_tokens``."""
        return plan_groups(rollout, max_tokens)

    def __call__(self, model: TransformerDecoder, rollout: Rollout) -> Tensor:
        check_model(model)
        check_rollout(rollout)
        layout = layout_of(rollout)
        check_length(model, layout)
        layout = layout.on(rollout.tokens.device)
        padding = rollout.prompt_width - rollout.prompt_lengths
        ids = rollout.tokens[layout.token_rows, padding[layout.token_rows] + layout.positions]
        order = _row_order(layout, rollout)
        predictors, targets = layout.predictors[order], ids[layout.targets[order]]

        def unembed(hidden: Tensor) -> Tensor:
            return self.head(model, model.norm(gather_rows(hidden[0], predictors)), targets, self.temperature)

        with unembed_swapped(model, unembed):
            logprobs = forward_with_pattern(model, ids[None], layout.positions[None], self.backend(layout))
        mask = rollout.response_mask
        return torch.zeros_like(mask, dtype=logprobs.dtype).masked_scatter(mask, logprobs)


def layout_of(rollout: Rollout) -> CompactLayout:
    """The rollout's compact layout, on CPU. Waits for the device."""
    return compact_layout(rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist(), rollout.groups.tolist())


def _row_order(layout: CompactLayout, rollout: Rollout) -> Tensor:
    """The order ``[E]`` in which the layout's response tokens come row after row: that in which a head expects them."""
    rows = layout.token_rows[layout.targets]
    return (rows * rollout.tokens.shape[1] + layout.positions[layout.targets]).argsort()

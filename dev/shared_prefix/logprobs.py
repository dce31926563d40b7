"""``SharedPrefixLogprobs``: the prompt of a group once, forward and backward, instead of once per completion."""

from dataclasses import dataclass, field

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
    positions that predict a response token. ``temperature`` is that of sampling. Padding is not computed at all.

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

        def unembed(hidden: Tensor) -> Tensor:
            predictors = gather_rows(hidden[0], layout.predictors)
            return self.head(model, model.norm(predictors), ids[layout.targets], self.temperature)

        with unembed_swapped(model, unembed):
            logprobs = forward_with_pattern(model, ids[None], layout.positions[None], self.backend(layout))
        return _by_row(logprobs, layout, rollout)


def layout_of(rollout: Rollout) -> CompactLayout:
    """The rollout's compact layout, on CPU. Waits for the device."""
    return compact_layout(rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist(), rollout.groups.tolist())


def _by_row(logprobs: Tensor, layout: CompactLayout, rollout: Rollout) -> Tensor:
    """``[E]`` in compact order -> ``[N, R]``, 0 outside the response mask."""
    shape = rollout.response_mask.shape
    rows = layout.token_rows[layout.targets]
    columns = layout.positions[layout.targets] - rollout.prompt_lengths[rows]
    return logprobs.new_zeros(shape.numel()).index_copy(0, rows * shape[1] + columns, logprobs).view(shape)

"""A ``generate`` component for benchmarks: every completion runs to ``max_new_tokens``."""

from dataclasses import dataclass, replace

from torch import Tensor
from torchtune.modules import TransformerDecoder

from torchtune_grpo.generation import Generate
from torchtune_grpo.types import PromptBatch, Rollout

NO_STOP = -1  # a stop id that no row can sample


@dataclass(frozen=True, kw_only=True)
class ForcedLength(Generate):
    """``Generate`` without stop tokens, so that every engine does the same work."""

    def __call__(self, model: TransformerDecoder, batch: PromptBatch, *, row_limits: Tensor | None = None) -> Rollout:
        return super().__call__(model, replace(batch, stop_ids=(NO_STOP,)), row_limits=row_limits)

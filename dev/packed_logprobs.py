"""``PackedLogprobs``: whole rows laid end to end in one sequence, so that nothing is computed for padding.

The plain sequence packing that shared prefixes are to be compared with: it pays for every row's prompt.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder

from dev.packing import plan_rows
from dev.shared_prefix import SDPABackend, SharedPrefixLogprobs
from dev.shared_prefix.attention import AttentionBackend
from dev.shared_prefix.checks import check_model
from torchtune_grpo.logprobs import FullSoftmaxHead, TargetHead
from torchtune_grpo.types import Rollout


@dataclass(frozen=True, kw_only=True)
class PackedLogprobs:
    """Log-probabilities equal to ``DenseLogprobs``'s, from rows packed first-fit decreasing (``plan_rows``).

    A ``LogprobsFn``. Positions restart with each row, and attention does not cross rows. This is shared-prefix
    execution in which every row is a group of its own; ``backend``, ``head``, collectives and refusals are those of
    ``SharedPrefixLogprobs``.
    """

    temperature: float = 1.0
    head: TargetHead = field(default_factory=FullSoftmaxHead)
    backend: AttentionBackend = field(default_factory=SDPABackend)

    check_model = staticmethod(check_model)  # asked at set-up, before weights load

    def plan(self, rollout: Rollout, max_tokens: int) -> list[Tensor]:
        """Whole rows within ``max_tokens``; a group may be spread over micro-batches. Raises ConfigError, see there."""
        return plan_rows(rollout, max_tokens)

    def __call__(self, model: TransformerDecoder, rollout: Rollout) -> Tensor:
        alone = replace(rollout, groups=torch.arange(len(rollout), device=rollout.groups.device))
        logprobs_fn = SharedPrefixLogprobs(temperature=self.temperature, head=self.head, backend=self.backend)
        return logprobs_fn(model, alone)

"""The off-policy twin: completions that were given, in place of sampled ones."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from torchtune_grpo.config import ConfigError
from torchtune_grpo.layout import key_mask
from torchtune_grpo.logprobs import DenseLogprobs
from torchtune_grpo.old_logprobs import score
from torchtune_grpo.rollouts import build_rollout
from torchtune_grpo.types import PromptBatch, Rollout


@dataclass(frozen=True, kw_only=True)
class GivenCompletions:
    """A ``GenerateFn`` that returns each prompt's worked solution, end token included, as its one completion.

    A solution longer than ``max_new_tokens`` is cut there and counts as truncated. ``old_logprobs`` are the model's own
    of these tokens, so the metric ``entropy`` is their cross-entropy. ``temperature`` divides the logits of student and
    teacher; ``max_tokens`` bounds a forward's rows * tokens. Collectives: those of ``score``.
    """

    max_new_tokens: int
    temperature: float = 1.0
    max_tokens: int = 16384
    group_size: ClassVar[int] = 1
    on_policy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens: got {self.max_new_tokens}, expected at least 1")
        if self.temperature <= 0:
            raise ConfigError(f"temperature: got {self.temperature}, expected > 0: it divides the logits")

    def longest(self, max_prompt_tokens: int) -> int:
        """The most tokens that a prompt of up to ``max_prompt_tokens`` and its completion may have."""
        return max_prompt_tokens + self.max_new_tokens

    def __call__(self, model: nn.Module, batch: PromptBatch) -> Rollout:
        device = next(model.parameters()).device
        lengths = torch.tensor([min(len(ids), self.max_new_tokens) for ids in batch.solutions])
        width = int(lengths.max())
        padded = [[*ids[:width], *[batch.pad_id] * (width - len(ids))] for ids in batch.solutions]
        responses = torch.tensor(padded).masked_fill(~key_mask(width, lengths), batch.pad_id)
        rollout = build_rollout(
            batch,
            responses=responses.to(device),
            logprobs=torch.zeros(responses.shape, device=device),
            lengths=lengths.to(device),
            truncated=torch.tensor([len(ids) > self.max_new_tokens for ids in batch.solutions], device=device),
            group_size=self.group_size,
            cache_bytes=0,
        )
        logprobs = DenseLogprobs(temperature=self.temperature)
        return replace(rollout, old_logprobs=score(model, rollout, logprobs, max_tokens=self.max_tokens))

"""What flows through one GRPO step, and the protocols that make its parts replaceable.

Axes: B prompts per rank, G ``group_size``, N = B*G rows with siblings contiguous (row ``b*G + g`` is
completion ``g`` of prompt ``b``), P padded prompt length, R padded completion length, S = P + R.
Prompts are padded on the left, completions on the right. Masks: True means *keep*. Log-probabilities are in
nats at the sampling temperature. Padding positions of any ``[N, R]`` float tensor hold 0 and carry weight 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

Metrics = Mapping[str, tuple[Tensor, Tensor]]
"""Name -> (masked sum, count), both scalars and local to a rank: reduced over ranks, then divided once."""


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """Prompts of one rank, before sampling.

    ``tokens [B, P]`` int64, left padded; ``lengths [B]`` int64, real tokens of each prompt;
    ``seeds [B]`` int64, the sampling seed of each prompt: all randomness of its completions comes from it,
    so a row does not depend on its neighbours and a resumed run needs no generator state.
    ``stop_ids`` end a completion; ``pad_id`` fills what follows (it may equal a stop id: masks come from lengths).
    ``solutions``: ids of each prompt's worked solution, end token included, for what imitates instead of sampling.
    """

    tokens: Tensor
    lengths: Tensor
    seeds: Tensor
    pad_id: int
    stop_ids: tuple[int, ...]
    answers: Sequence[str]
    solutions: Sequence[Sequence[int]]
    source: Sequence[str]

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def rows(self, start: int, end: int) -> "PromptBatch":
        """The prompts from ``start`` up to ``end``."""
        part = slice(start, end)
        return replace(
            self,
            tokens=self.tokens[part],
            lengths=self.lengths[part],
            seeds=self.seeds[part],
            answers=self.answers[part],
            solutions=self.solutions[part],
            source=self.source[part],
        )


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What generation returned.

    ``tokens [N, S]`` int64: left-padded prompt, then completion, then pad ids after the stop token.
    ``positions [N, S]`` int64: 0 at the first real token (and on the padding before it).
    ``response_mask [N, R]`` bool: True = sampled and trained, stop token included; one contiguous run from 0.
    ``old_logprobs [N, R]`` fp32: of the sampled tokens, at the sampling temperature.
    ``truncated [N]`` bool: True = the length limit ended the completion, not a stop token.
    ``groups [N]`` int64: the number of each row's prompt in this rollout; rows of one number are siblings, stand
    next to each other and share their prompt's tokens. A rollout holds whole groups of ``group_size``; a micro-batch
    cut from it may hold a part of one.
    ``cache_bytes``: the most that keys and values took on this rank while sampling.
    """

    tokens: Tensor
    positions: Tensor
    response_mask: Tensor
    old_logprobs: Tensor
    truncated: Tensor
    groups: Tensor
    answers: Sequence[str]
    source: Sequence[str]
    group_size: int
    cache_bytes: int

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def prompt_width(self) -> int:
        """P, the padded prompt length."""
        return self.tokens.shape[1] - self.response_mask.shape[1]

    @property
    def prompt_lengths(self) -> Tensor:
        """Real prompt tokens of each row, int64 ``[N]``."""
        return self.positions[:, self.prompt_width - 1] + 1

    @property
    def response_lengths(self) -> Tensor:
        """Trained tokens of each row, stop token included, int64 ``[N]``."""
        return self.response_mask.sum(dim=1)

    @property
    def responses(self) -> Tensor:
        """The completion part of ``tokens``, int64 ``[N, R]``."""
        return self.tokens[:, self.prompt_width :]

    def rows(self, index: Tensor) -> "Rollout":
        """The rows named by int64 ``index [n]``, siblings still contiguous."""
        chosen = index.tolist()
        index = index.to(self.tokens.device)
        return replace(
            self,
            tokens=self.tokens[index],
            positions=self.positions[index],
            response_mask=self.response_mask[index],
            old_logprobs=self.old_logprobs[index],
            truncated=self.truncated[index],
            groups=self.groups[index],
            answers=[self.answers[i] for i in chosen],
            source=[self.source[i] for i in chosen],
        )

    def to(self, device: torch.device) -> "Rollout":
        """With all tensors on ``device``."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            response_mask=self.response_mask.to(device),
            old_logprobs=self.old_logprobs.to(device),
            truncated=self.truncated.to(device),
            groups=self.groups.to(device),
        )


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """The judges' verdicts on a rollout, fp32 on CPU.

    ``total [N]``: weighted sum of the parts, NaN where any judge could not judge the row (such a row is left out
    of its group's statistics and of the loss; it harms nobody else).
    ``parts {name: [N]}``: each judge's raw reward, NaN where it returned None.
    ``success [N]``: the verifier's reward > 0 as 0. or 1., NaN where it could not judge.
    """

    total: Tensor
    parts: Mapping[str, Tensor]
    success: Tensor


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A rollout and all that the loss needs.

    ``advantages [N, R]`` fp32; ``ref_logprobs [N, R]`` fp32, of the frozen reference policy (equal to
    ``rollout.old_logprobs`` where no component asked for a reference);
    ``token_weights [N, R]`` fp32: the whole normalisation, see ``torchtune_grpo.normalization``.
    """

    rollout: Rollout
    advantages: Tensor
    ref_logprobs: Tensor
    token_weights: Tensor

    def __len__(self) -> int:
        return len(self.rollout)

    def rows(self, index: Tensor) -> "Trajectory":
        """The rows named by int64 ``index [n]``, siblings still contiguous."""
        device_index = index.to(self.advantages.device)
        return replace(
            self,
            rollout=self.rollout.rows(index),
            advantages=self.advantages[device_index],
            ref_logprobs=self.ref_logprobs[device_index],
            token_weights=self.token_weights[device_index],
        )

    def to(self, device: torch.device) -> "Trajectory":
        """With the tensors named above on ``device``; what a subclass adds stays where it is."""
        return replace(
            self,
            rollout=self.rollout.to(device),
            advantages=self.advantages.to(device),
            ref_logprobs=self.ref_logprobs.to(device),
            token_weights=self.token_weights.to(device),
        )


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """``loss`` scalar, a weighted sum over the local tokens; ``metrics`` local (sum, count) pairs, detached."""

    loss: Tensor
    metrics: Metrics


class GenerateFn(Protocol):
    """Samples ``group_size`` completions of each prompt. Says in its docstring which collectives it makes."""

    def __call__(self, model: nn.Module, batch: PromptBatch) -> Rollout: ...


class RewardFn(Protocol):
    """Judges completions: one float a row, or None where the row cannot be judged.

    Beside ``completions`` and ``answers`` a judge may name any of these keyword arguments and gets what it names:
    ``response_lengths: list[int]`` (tokens), ``truncated: list[bool]``, ``source: list[str]``.
    """

    def __call__(self, completions: Sequence[str], answers: Sequence[str]) -> list[float | None]: ...


class AdvantageFn(Protocol):
    """Rewards -> advantages ``[N, R]``, 0 outside the response mask.

    ``needs_reference`` asks for ref logprobs; ``min_group_size`` is the least ``group_size`` that it can learn from.
    """

    needs_reference: bool
    min_group_size: int

    def __call__(self, rewards: Rewards, rollout: Rollout, ref_logprobs: Tensor) -> Tensor: ...


class LogprobsFn(Protocol):
    """Log-probabilities of the sampled tokens ``[N, R]`` fp32, differentiable, 0 outside the response mask.

    It also plans the micro-batches that it is given, since it alone knows what a row costs beside others: ``plan``
    returns row indices, int64 on CPU, of parts that each cost at most ``max_tokens`` tokens; every row stands in
    exactly one part, siblings of a part next to each other. Local; no collective.
    """

    def plan(self, rollout: Rollout, max_tokens: int) -> list[Tensor]: ...

    def __call__(self, model: nn.Module, rollout: Rollout) -> Tensor: ...


class LossFn(Protocol):
    """Policy log-probabilities ``[N, R]`` and a trajectory -> a plain weighted sum over tokens, and metrics."""

    needs_reference: bool

    def __call__(self, logprobs: Tensor, trajectory: Trajectory) -> LossOutput: ...


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of ``values`` where ``mask`` is True; what stands elsewhere, NaN included, has no effect."""
    return torch.where(mask, values, torch.zeros_like(values)).sum()

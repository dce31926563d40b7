"""What a teacher hands over for each token of a row, and the trajectory that carries it.

========================  ====================  ==================================================================
component                 a token, [W]          use
========================  ====================  ==================================================================
``NoPayload``             nothing               the log-probability of the sampled token is always there
``HiddenStates``          W = D of the teacher  projected through that teacher's LM head where the loss is computed
``Logits``                W = V                 the same numbers before any rounding of ours; V / D times larger
========================  ====================  ==================================================================

Each row keeps its own ``[length, W]`` tensor, on CPU until its micro-batch is due: nothing is padded, neither to the
longest row nor to the widest teacher.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtune.modules import TransformerDecoder

from torchtune_grpo.models.internals import lm_head
from torchtune_grpo.training.setup import DTYPES
from torchtune_grpo.types import Rollout, Trajectory


class Payload(Protocol):
    """A kind of payload: ``hidden [T, D]`` after the teacher's ``norm`` -> ``[T, W]`` in ``torch_dtype``.

    ``needs_head``: the loss projects it through the teacher's LM head; ``torch_dtype`` None: any will do. The first
    ``vocab_size`` rows of a head are the tokenizer's, what follows only pads it. Called inside the teacher's forward,
    where its head is unsharded.
    """

    needs_head: bool
    torch_dtype: torch.dtype | None

    def width(self, model: TransformerDecoder, vocab_size: int) -> int: ...

    def __call__(self, model: TransformerDecoder, hidden: Tensor, vocab_size: int) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class NoPayload:
    """Nothing beside the log-probability of the sampled token, ``[T, 0]``."""

    needs_head: ClassVar[bool] = False
    torch_dtype: ClassVar[torch.dtype | None] = None

    def __call__(self, model: TransformerDecoder, hidden: Tensor, vocab_size: int) -> Tensor:
        return hidden[:, :0]

    def width(self, model: TransformerDecoder, vocab_size: int) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """The states that the teacher's LM head reads, ``[T, D]``; ``dtype`` must be that of the teachers."""

    dtype: Literal["fp32", "bf16"] = "bf16"
    needs_head: ClassVar[bool] = True

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def __call__(self, model: TransformerDecoder, hidden: Tensor, vocab_size: int) -> Tensor:
        return hidden

    def width(self, model: TransformerDecoder, vocab_size: int) -> int:
        return model.tok_embeddings.embedding_dim


@dataclass(frozen=True, kw_only=True)
class Logits:
    """All logits of the teacher, ``[T, V]``; ``dtype`` must be that of the teachers."""

    dtype: Literal["fp32", "bf16"] = "bf16"
    needs_head: ClassVar[bool] = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def __call__(self, model: TransformerDecoder, hidden: Tensor, vocab_size: int) -> Tensor:
        return F.linear(hidden, lm_head(model)[:vocab_size])

    def width(self, model: TransformerDecoder, vocab_size: int) -> int:
        return vocab_size


@dataclass(frozen=True, kw_only=True)
class DistillationTrajectory(Trajectory):
    """A trajectory with what its rows' teachers said.

    ``ref_logprobs``: the teachers' log-probabilities of the sampled tokens. ``teacher_index [N]`` int64 on CPU, None
    where rows are not tagged; ``payload``: one ``[length, W]`` tensor a row on CPU, W that of its teacher.
    """

    teacher_index: Tensor | None
    payload: Sequence[Tensor]

    def rows(self, index: Tensor) -> "DistillationTrajectory":
        column = self.teacher_index
        return replace(
            super().rows(index),
            teacher_index=None if column is None else column[index],
            payload=[self.payload[i] for i in index.tolist()],
        )


def check_order(targets: Tensor, rollout: Rollout) -> None:
    """Raises ValueError unless a ``TargetHead`` is given the response tokens row after row, as payloads are stored."""
    expected = rollout.responses[rollout.response_mask]
    if targets.shape != expected.shape or not torch.equal(targets, expected):
        raise ValueError("logprobs: got response tokens in an order of its own, expected row after row")

"""Where student and teachers meet: the LM head that yields divergences in place of log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtune.modules import TransformerDecoder

from torchtune_grpo.distillation.components import Divergence
from torchtune_grpo.distillation.divergences import (
    TokenStatistics,
    divergence_from_hidden,
    divergence_from_logits,
    divergence_fused,
)
from torchtune_grpo.distillation.heads import TeacherHeads
from torchtune_grpo.distillation.payloads import DistillationTrajectory, check_order
from torchtune_grpo.distillation.routing import rows_by_teacher
from torchtune_grpo.distillation.vocabulary_parallel import HeadGroup
from torchtune_grpo.models.internals import lm_head


@dataclass(frozen=True, kw_only=True)
class TeacherSide:
    """What the student's side keeps of the teachers during an update, by the teachers' numbers.

    ``names``; ``widths``: W of each one's payload; ``dtype``: that of the payloads; ``heads``: their LM heads, None
    where the payload is all logits; ``vocabulary``: this rank's slice of every LM head.
    """

    names: Sequence[str]
    widths: Sequence[int]
    dtype: torch.dtype
    heads: TeacherHeads | None
    vocabulary: HeadGroup


@dataclass
class DivergenceHead:
    """A ``TargetHead`` that returns each response token's share of the loss, ``token_weight * divergence [T]`` fp32.

    Only the sum of what it returns is to be differentiated: its gradient is made beside the values, as a whole. Serves
    one forward on ``trajectory`` and leaves ``statistics [T, 3]`` behind, without gradient: divergence, reverse KL and
    the student's entropy, nats. ``fused``: neither model's logits exist in one piece; otherwise the student's do, for
    the tokens of one teacher at a time.

    Collectives: without vocabulary slices none. With them, for every teacher in order one all-gather of counts and, if
    any rank of the group has a token of it, three all-gathers (states, payloads, weights) and the divergence's own.

    Raises:
        ValueError: on a payload that is not its row's (length, width, dtype), before anything is moved or projected.
    """

    divergence: Divergence
    trajectory: DistillationTrajectory
    teachers: TeacherSide
    fused: bool
    chunk_size: int | None
    statistics: Tensor | None = None

    def __call__(self, model: TransformerDecoder, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        rollout, teachers, vocabulary = self.trajectory.rollout, self.teachers, self.teachers.vocabulary
        check_order(targets, rollout)
        head = lm_head(model)
        if len(head) > vocabulary.stop - vocabulary.start:  # a slice of everything would still cost a copy backward
            head = head[vocabulary.start : vocabulary.stop]
        if len(targets) == 0:  # no loss, but a function of the student: its backward makes the same collectives
            return self._nothing(hidden, head)
        by_teacher = rows_by_teacher(self.trajectory.teacher_index, len(rollout), len(teachers.names))
        payloads = [self._payload(number, rows) for number, rows in enumerate(by_teacher)]
        row_of_token = torch.arange(len(rollout)).repeat_interleave(rollout.response_lengths.cpu())
        weights = self.trajectory.token_weights[rollout.response_mask]
        total, statistics = hidden.new_zeros((), dtype=torch.float32), weights.new_empty(len(targets), 3)
        for number, rows in enumerate(by_teacher):
            mine = torch.isin(row_of_token, rows).nonzero().flatten().to(hidden.device)
            counts = vocabulary.counts(len(mine), hidden.device)
            if any(counts):
                student = vocabulary.gather(hidden[mine], counts, reduce_gradient=not self.fused)
                teacher = vocabulary.gather(payloads[number].to(hidden.device), counts)
                gathered = vocabulary.gather(weights[mine], counts)
                part, tokens = self._project(number, student, head, teacher, gathered, temperature)
                total = total + part
                values = torch.stack([tokens.divergence, tokens.reverse_kl, tokens.student_entropy], dim=1)
                statistics[mine] = vocabulary.own(values, counts)
        self.statistics = statistics
        return weights * statistics[:, 0] + (total - total.detach()) / len(targets)

    def _nothing(self, hidden: Tensor, head: Tensor) -> Tensor:
        if self.teachers.vocabulary.group is not None:
            raise ValueError("got a micro-batch without a response token, expected one on each rank that shares a head")
        self.statistics = hidden.new_zeros(0, 3, dtype=torch.float32)
        return F.linear(hidden, head).sum(dim=-1).float()

    def _project(
        self, number: int, student: Tensor, head: Tensor, teacher: Tensor, weights: Tensor, temperature: float
    ) -> tuple[Tensor, TokenStatistics]:
        """Loss and statistics of tokens: ``student [t, D]``, ``head [V / tp, D]``, payloads ``teacher [t, W]``."""
        vocabulary, heads = self.teachers.vocabulary, self.teachers.heads
        options = {"temperature": temperature, "chunk_size": self.chunk_size, "group": vocabulary.group}
        if heads is None:
            logits = teacher[:, vocabulary.start : vocabulary.stop]
            return divergence_from_logits(self.divergence, F.linear(student, head), logits, weights, **options)
        if self.fused:
            theirs = heads.weight(number)
            return divergence_fused(self.divergence, student, head, teacher, theirs, weights, **options)
        logits = F.linear(student, head)
        return divergence_from_hidden(self.divergence, logits, teacher, heads.weight(number), weights, **options)

    def _payload(self, number: int, rows: Tensor) -> Tensor:
        """The payload ``[tokens, W]`` on CPU of the rows of one teacher."""
        teachers, lengths = self.teachers, self.trajectory.rollout.response_lengths.tolist()
        width = teachers.widths[number]
        parts = [torch.empty(0, width, dtype=teachers.dtype)]
        for row in rows.tolist():
            part = self.trajectory.payload[row]
            if part.shape != (lengths[row], width) or part.dtype != teachers.dtype:
                raise ValueError(
                    f"row {row}: got a payload {tuple(part.shape)} of {part.dtype} from the teacher "
                    f"{teachers.names[number]!r}, expected {(lengths[row], width)} of {teachers.dtype}"
                )
            parts.append(part)
        return torch.cat(parts)

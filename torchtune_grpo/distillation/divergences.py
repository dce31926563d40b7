"""Full-vocabulary divergences between a student and a teacher, weighted and summed over tokens.

Three entry points differ only in what exists already. T rows (tokens), D hidden size, V/tp entries of the vocabulary:

======================  ============================================  ==========================================
function                given                                         memory beyond inputs and their gradients
======================  ============================================  ==========================================
divergence_from_logits  both models' logits ``[T, V/tp]``             tiles that stay in the cache
divergence_from_hidden  student's logits, teacher's hidden states     the teacher's logits of a chunk
divergence_fused        hidden states and head weights of both        both models' logits of a chunk
======================  ============================================  ==========================================

Each returns ``sum_t token_weights_t * divergence_t``, since the weights carry the whole normalisation
(``torchtune_grpo.normalization``) and are known before the loss is: the gradient is then made beside the value, in
the forward pass (where grad mode is on), and each head runs once. The backward pass scales it in place by the gradient
of the sum, and can run once. The teacher is a constant: a teacher's tensor that requires grad is refused, since
it is a teacher that was not frozen or an argument in the wrong place.

Vocabulary-parallel: with a ``group``, each rank passes its own slice of the vocabulary (slices may differ in size,
none is empty) and the same T rows, token weights, temperature and chunk size. The sum and the statistics come back
complete on every rank; so do the gradients of the logits or head weights of its slice, and that of ``student_hidden``,
which is reduced over the group already. Collectives over the group, all in the forward pass: for each chunk of c
rows an all-reduce MAX of ``[2, c]``, SUM of ``[2, c]`` and SUM of ``[4, c]``; in the fused form one SUM of ``[T, D]``
at the end, if ``student_hidden`` needs a gradient.

Neither values nor gradients depend on ``chunk_size`` (rows; None = a 50th of them, at least 40) or the number of ranks
beyond rounding. Arithmetic is fp32, float64 for a float64 student; logits made from hidden states are rounded to the
dtype of their head first, as the models' own are; gradients have the dtype of what they belong to.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtune_grpo.distillation.chunked import GivenLogits, ProjectedLogits, Source, WeightedDivergence
from torchtune_grpo.distillation.components import Divergence

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)  # fp16 cannot hold a gradient of 1 / tokens


@dataclass(frozen=True, kw_only=True)
class TokenStatistics:
    """Each token over the whole vocabulary, nats: ``[T]`` fp32 (float64 for a float64 student), detached.

    ``divergence``: what the component measures; ``reverse_kl``: KL(student || teacher); ``student_entropy``.
    """

    divergence: Tensor
    reverse_kl: Tensor
    student_entropy: Tensor


def divergence_from_logits(
    divergence: Divergence,
    student_logits: Tensor,
    teacher_logits: Tensor,
    token_weights: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, TokenStatistics]:
    """The weighted sum over tokens, a scalar differentiable in ``student_logits``, and each token's statistics.

    ``student_logits``, ``teacher_logits`` ``[T, V/tp]``, each in its model's dtype; ``token_weights [T]``: constants.
    Collectives, memory and precision: see the module.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit, naming both sides; a teacher that requires grad.
    """
    student, teacher = {"student_logits": student_logits}, {"teacher_logits": teacher_logits}
    size = _checked_chunk_size(student, teacher, token_weights, temperature, chunk_size)
    sources = GivenLogits(student_logits, differentiate=_differentiated(student_logits)), GivenLogits(teacher_logits)
    return _run(divergence, sources, token_weights, temperature, size, group, student_logits)


def divergence_from_hidden(
    divergence: Divergence,
    student_logits: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    token_weights: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, TokenStatistics]:
    """``divergence_from_logits`` with the teacher's logits made chunk by chunk.

    ``teacher_hidden [T, D_teacher]``: after the teacher's final norm; ``teacher_weight [V/tp, D_teacher]``: this
    rank's rows of the teacher's head, of the same dtype.
    """
    student = {"student_logits": student_logits}
    teacher = {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    size = _checked_chunk_size(student, teacher, token_weights, temperature, chunk_size)
    sources = (
        GivenLogits(student_logits, differentiate=_differentiated(student_logits)),
        ProjectedLogits(teacher_hidden, teacher_weight, size),
    )
    return _run(divergence, sources, token_weights, temperature, size, group, student_logits)


def divergence_fused(
    divergence: Divergence,
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    token_weights: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, TokenStatistics]:
    """``divergence_from_logits`` of two heads, with neither model's logits in memory beyond a chunk.

    ``student_hidden [T, D]``, ``student_weight [V/tp, D]``: the sum is differentiable in both, and their gradients are
    added up in fp32 before they are cast; ``teacher_hidden [T, D_teacher]``, ``teacher_weight [V/tp, D_teacher]``.
    Hidden states are those after the final norm, in the dtype of their head.
    """
    student = {"student_hidden": student_hidden, "student_weight": student_weight}
    teacher = {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    size = _checked_chunk_size(student, teacher, token_weights, temperature, chunk_size)
    wanted = _differentiated(student_hidden), _differentiated(student_weight)
    sources = (
        ProjectedLogits(student_hidden, student_weight, size, differentiate=wanted),
        ProjectedLogits(teacher_hidden, teacher_weight, size),
    )
    return _run(divergence, sources, token_weights, temperature, size, group, student_hidden, student_weight)


def _run(
    divergence: Divergence,
    sources: tuple[Source, Source],
    token_weights: Tensor,
    temperature: float,
    chunk_size: int,
    group: ProcessGroup | None,
    *inputs: Tensor,
) -> tuple[Tensor, TokenStatistics]:
    total, values, reverse_kl, entropy = WeightedDivergence.apply(
        divergence, *sources, token_weights.detach(), temperature, chunk_size, group, *inputs
    )
    return total, TokenStatistics(divergence=values, reverse_kl=reverse_kl, student_entropy=entropy)


def _differentiated(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _checked_chunk_size(
    student: Mapping[str, Tensor],
    teacher: Mapping[str, Tensor],
    token_weights: Tensor,
    temperature: float,
    chunk_size: int | None,
) -> int:
    """Rows of a chunk, once everything else is known to fit. Equal on all ranks, so it may not depend on V/tp."""
    (rows, vocabulary), (teacher_rows, teacher_vocabulary) = _logits_shape(student), _logits_shape(teacher)
    sides = f"{' @ '.join(student)} and {' @ '.join(teacher)}"
    if vocabulary != teacher_vocabulary or vocabulary == 0:
        raise ValueError(
            f"vocabulary of {sides}: got {vocabulary} and {teacher_vocabulary}, expected the same > 0 on this rank"
        )
    if not rows == teacher_rows == len(token_weights) or token_weights.dim() != 1:
        raise ValueError(
            f"rows of {sides} and shape of token_weights: got {rows}, {teacher_rows} and"
            f" {list(token_weights.shape)}, expected one row and one weight a token"
        )
    for name, tensor in teacher.items():
        if tensor.requires_grad:
            raise ValueError(f"{name} requires grad, but a teacher is a constant: freeze it, or pass a detached tensor")
    if temperature <= 0:
        raise ValueError(f"temperature: got {temperature}, expected > 0")
    if chunk_size is not None and chunk_size <= 0:
        raise ValueError(f"chunk_size: got {chunk_size}, expected rows >= 1, or null for a size that fits")
    return chunk_size or max(8 * (rows // 400), 40)  # BLAS likes multiples of 8


def _logits_shape(side: Mapping[str, Tensor]) -> tuple[int, int]:
    """(rows, vocabulary) of logits, or of hidden states and a head."""
    for name, tensor in side.items():
        if tensor.dim() != 2 or tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{name}: got {tensor.dtype} of shape {list(tensor.shape)}, expected two axes and"
                f" one of {', '.join(map(str, _DTYPES))}"
            )
    first, *rest = side.values()
    if not rest:
        return tuple(first.shape)
    (last,) = rest
    if (first.shape[1], first.dtype) != (last.shape[1], last.dtype):
        hidden, weight = side
        raise ValueError(
            f"{hidden} has hidden size {first.shape[1]} in {first.dtype}, {weight} has {last.shape[1]} in {last.dtype}:"
            " expected the same"
        )
    return len(first), len(last)

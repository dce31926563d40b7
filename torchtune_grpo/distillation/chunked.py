"""A weighted sum of per-token divergences and its gradient, chunk by chunk of rows, in one forward pass.

The caller's token weights are known before the loss is, so the gradient of ``sum_t weight_t * divergence_t`` is made
beside the value while a chunk's logits are at hand, and the backward pass only multiplies it by the gradient of
the sum. Recomputing in the backward pass instead would run both heads twice: six matrix products and not four.

A chunk is ``[c, V/tp]`` in the model's dtype. Arithmetic on it is fp32 (float64 for float64) in tiles of columns that
stay in a CPU's cache: no whole chunk is ever made in fp32, and the formulas need not work in place.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Terms = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""See ``torchtune_grpo.distillation.Divergence``."""

# Elements of one fp32 temporary; a handful are alive at once. On a CPU they should stay in the cache: at half the size
# PyTorch uses one thread, at twice the size the allocator asks the kernel for fresh pages, and either takes twice the
# time. Elsewhere a kernel should take longer than its launch.
_CPU_TILE_ELEMENTS = 2**16
_TILE_ELEMENTS = 2**22
# Entries of the vocabulary in one product of a batch. With few rows, a CPU's BLAS is 1.1 to 1.5 times as fast on such
# a batch as on one product with the whole head.
_BLOCK = 1024
_PARTIAL_SUMS = 8  # of a product that sums over the vocabulary; as fast as more, and small


class GivenLogits:
    """Logits ``[T, V/tp]`` that exist already; their gradient is one buffer of their dtype."""

    def __init__(self, logits: Tensor, *, differentiate: bool = False) -> None:
        self._logits = logits
        self.gradients = (torch.empty_like(logits) if differentiate else None,)

    def __len__(self) -> int:
        return len(self._logits)

    def chunk(self, rows: slice) -> Tensor:
        return self._logits[rows]

    def gradient_chunk(self, rows: slice, logits: Tensor) -> Tensor:
        """Where the gradient of the rows is to be written; ``logits`` is what ``chunk`` returned."""
        return self.gradients[0][rows]

    def take_gradient(self, rows: slice, gradient: Tensor) -> None:
        """Called when ``gradient_chunk`` is filled."""

    def finish(self, group: dist.ProcessGroup | None) -> None:
        """Called after the last chunk."""


class ProjectedLogits:
    """``hidden [T, D] @ weight [V/tp, D].T``, made in one buffer of a chunk's size, which the gradient overwrites.

    The gradients of ``hidden`` and ``weight`` are added up in fp32 (float64 for float64) and then cast.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, chunk_size: int, *, differentiate: tuple[bool, bool] = (False, False)
    ) -> None:
        self._hidden, self._weight = hidden, weight
        self._buffer = hidden.new_empty(min(chunk_size, len(hidden)) * len(weight))
        dtype = accumulation_dtype(hidden.dtype)
        self.gradients = tuple(
            torch.zeros_like(tensor, dtype=dtype) if wanted else None
            for tensor, wanted in zip((hidden, weight), differentiate, strict=True)
        )

    def __len__(self) -> int:
        return len(self._hidden)

    def chunk(self, rows: slice) -> Tensor:
        hidden = self._hidden[rows].t()
        # Kept as [V/tp, c], the layout that suits the batched product.
        logits = self._buffer[: len(self._weight) * hidden.shape[1]].view(len(self._weight), -1)
        blocks, rest = _blocks(self._weight, _BLOCK)
        out_blocks, out_rest = _blocks(logits, _BLOCK)
        torch.bmm(blocks, hidden.expand(len(blocks), -1, -1), out=out_blocks)
        torch.mm(rest, hidden, out=out_rest)
        return logits.t()

    def gradient_chunk(self, rows: slice, logits: Tensor) -> Tensor:
        return logits

    def take_gradient(self, rows: slice, gradient: Tensor) -> None:
        of_hidden, of_weight = self.gradients
        gradient, hidden = gradient.t(), self._hidden[rows]
        if of_hidden is not None:
            of_hidden[rows] = _product_over_vocabulary(gradient, self._weight)
        if of_weight is None:
            return
        if of_weight.dtype == hidden.dtype:
            of_weight.addmm_(gradient, hidden)
            return
        for out, block in zip(of_weight.split(_BLOCK), gradient.split(_BLOCK), strict=True):
            out += block @ hidden

    def finish(self, group: dist.ProcessGroup | None) -> None:
        """Collective, if the gradient of ``hidden`` is wanted: one all-reduce SUM of ``[T, D]``."""
        of_hidden, of_weight = self.gradients
        if of_hidden is not None:
            of_hidden = _all_reduce(of_hidden, dist.ReduceOp.SUM, group).to(self._hidden.dtype)
        if of_weight is not None:
            of_weight = of_weight.to(self._weight.dtype)
        self.gradients = (of_hidden, of_weight)


Source = GivenLogits | ProjectedLogits


class WeightedDivergence(torch.autograd.Function):
    """(sum, divergence [T], reverse KL [T], student entropy [T]); only the sum is differentiable.

    ``inputs`` are the student's tensors, in the order of ``student.gradients``. A second backward pass through the same
    graph is refused by autograd, because the first scales the gradients in place.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        terms: Terms,
        student: Source,
        teacher: Source,
        token_weights: Tensor,
        temperature: float,
        chunk_size: int,
        group: dist.ProcessGroup | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weights = token_weights.to(accumulation_dtype(inputs[0].dtype))
        statistics = weights.new_empty(3, len(student))
        for rows in _slices(len(student), chunk_size):
            pair = (student.chunk(rows), teacher.chunk(rows))
            chunk = _Chunk(terms, pair, temperature, group, weights.dtype)
            statistics[:, rows] = chunk.statistics
            if any(gradient is not None for gradient in student.gradients):
                gradient = student.gradient_chunk(rows, pair[0])
                chunk.write_gradient(gradient, weights[rows])
                student.take_gradient(rows, gradient)
        student.finish(group)
        ctx.save_for_backward(*student.gradients)
        per_token = statistics.unbind()
        ctx.mark_non_differentiable(*per_token)
        return (weights * per_token[0]).sum(), *per_token

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, of_sum: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a copy would double the largest tensors of the step.
        gradients = [None if gradient is None else gradient.mul_(of_sum) for gradient in ctx.saved_tensors]
        return *[None] * 7, *gradients


class _Chunk:
    """Log-probabilities, divergence and gradient of the rows of one chunk.

    Collectives over ``group``, all when it is made: all-reduce MAX of the row maxima, SUM of the sums of exponentials
    (of student and teacher, each ``[2, c]``), SUM of the expectations ``[4, c]``.
    """

    def __init__(
        self,
        terms: Terms,
        pair: tuple[Tensor, Tensor],
        temperature: float,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
    ) -> None:
        self._terms, self._pair, self._temperature = terms, pair, temperature
        self._maxima, self._log_sums = self._normalizers(group, dtype)
        sums = torch.zeros(4, len(pair[0]), dtype=dtype, device=pair[0].device)
        for columns in self._tiles():
            sums += self._sums(columns)
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        self.statistics, self._score_sums = sums[:3], sums[3, :, None]

    def write_gradient(self, out: Tensor, weights: Tensor) -> None:
        """Gradient of ``(weights * divergence).sum()`` with respect to the student's logits; ``out`` may be these."""
        scale = (weights / self._temperature)[:, None]
        for columns in self._tiles():
            out[:, columns] = self._gradient(columns).mul_(scale)

    def _normalizers(self, group: dist.ProcessGroup | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Row maxima, and logs of sums of exponentials above them, of student and teacher, each ``[2, c, 1]``.

        They stay apart: their sum would round the log-probabilities to the precision of the largest logit.
        """
        maxima = torch.stack([logits.amax(dim=1, keepdim=True) for logits in self._pair]).to(dtype) / self._temperature
        _all_reduce(maxima, dist.ReduceOp.MAX, group)
        sums = torch.zeros_like(maxima)
        for columns in self._tiles():
            for logits, maximum, total in zip(self._pair, maxima, sums, strict=True):
                total += self._scaled(logits[:, columns], maximum).exp_().sum(dim=1, keepdim=True)
        return maxima, _all_reduce(sums, dist.ReduceOp.SUM, group).log()

    # One method a tile, so that its temporaries are gone before the next tile's are made.

    def _sums(self, columns: slice) -> Tensor:
        student, teacher, probs = self._distributions(columns)
        values, scores = (terms.sum(dim=1) for terms in self._terms(student, teacher, probs))
        reverse_kl = teacher.sub_(student).mul_(probs).sum(dim=1).neg()
        entropy = student.mul_(probs).sum(dim=1).neg()
        return torch.stack([values, reverse_kl, entropy, scores])

    def _gradient(self, columns: slice) -> Tensor:
        student, teacher, probs = self._distributions(columns)
        _, scores = self._terms(student, teacher, probs)
        return torch.addcmul(scores, probs, self._score_sums, value=-1)

    def _distributions(self, columns: slice) -> tuple[Tensor, Tensor, Tensor]:
        """log p_s, log p_t and p_s of a tile."""
        student, teacher = (
            self._scaled(logits[:, columns], maximum).sub_(log_sum)
            for logits, maximum, log_sum in zip(self._pair, self._maxima, self._log_sums, strict=True)
        )
        return student, teacher, student.exp()

    def _scaled(self, logits: Tensor, offset: Tensor) -> Tensor:
        """``logits / temperature - offset`` in the dtype of ``offset``, in one pass."""
        return torch.add(-offset, logits, alpha=1 / self._temperature)

    def _tiles(self) -> Iterator[slice]:
        rows, columns = self._pair[0].shape
        elements = _CPU_TILE_ELEMENTS if self._pair[0].device.type == "cpu" else _TILE_ELEMENTS
        return _slices(columns, max(1, elements // rows))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _product_over_vocabulary(gradient: Tensor, weight: Tensor) -> Tensor:
    """``gradient [V/tp, c].T @ weight [V/tp, D]``, from partial sums."""
    size = max(1, len(weight) // _PARTIAL_SUMS)
    (gradient_blocks, gradient_rest), (blocks, rest) = _blocks(gradient, size), _blocks(weight, size)
    return torch.bmm(gradient_blocks.transpose(1, 2), blocks).sum(dim=0) + gradient_rest.t() @ rest


def _blocks(matrix: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """``[V, n]`` as views ``[V // size, size, n]`` and the last ``V % size`` rows; either may be empty."""
    whole = len(matrix) // size * size
    return matrix[:whole].unflatten(0, (whole // size, size)), matrix[whole:]


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    """Reduces in place over ``group``; None stands for a group of one."""
    if group is not None:
        dist.all_reduce(tensor, op, group=group)
    return tensor

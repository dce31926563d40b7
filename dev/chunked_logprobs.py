"""Log-probabilities of target tokens without a softmax over all logits: two heads to name as ``logprobs.head``.

``ChunkedHead`` has the model compute its logits ``[T, V]`` in the model's dtype and never holds more than a few rows
of them in fp32. ``FusedLinearHead`` does not hold ``[T, V]`` in any dtype: it walks over the vocabulary and multiplies
the hidden states by one block of the head's rows at a time, twice where a gradient is wanted.

Both compute in fp32 (float64 for float64 inputs) and keep a row's log-sum-exp, one number, from forward to backward,
so that backward's softmax is ``exp(logits / temperature - logsumexp)`` in any chunk, in one pass. Neither can be
differentiated twice.

Left out: the loss's gradient taken in forward (Liger's fused linear cross-entropy), since a policy loss only knows it
once all log-probabilities of the micro-batch are there; head biases, which none of the model families has.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchtune.modules import TiedLinear

from torchtune_grpo.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class ChunkedHead:
    """A ``TargetHead`` over the model's own logits, ``chunk_size`` of their rows in fp32 at a time.

    ``chunk_size`` null: all rows at once. Beside the logits, forward takes two chunks in fp32, backward the logits'
    gradient, in their dtype, and one chunk. Neither values nor gradients depend on the chunk. The default is what a
    CPU's cache holds.
    """

    chunk_size: int | None = 16

    def __post_init__(self) -> None:
        _check_chunk_size(self.chunk_size, "rows")

    def __call__(self, model: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        return chunked_logprobs(model.output(hidden), targets, temperature, self.chunk_size).float()


@dataclass(frozen=True, kw_only=True)
class FusedLinearHead:
    """A ``TargetHead`` that never holds the logits: ``chunk_size`` columns of the vocabulary at a time.

    ``chunk_size`` null: the whole vocabulary at once. Blocks of columns and not of rows, since each block of the
    head's gradient is then complete after one matrix product: rounded once, with no accumulator of the head's size.
    Memory: one block and two quarters of one in fp32, the hidden states' gradient summed in fp32, and the head's
    gradient, which any head returns. Matrix products: four, against three with the logits at hand.

    The head's weight enters autograd as it stands in the forward, so FSDP reduces its gradient, tied or not.

    Raises:
        ConfigError: at the first call, if ``model.output`` is not a linear map without bias.
    """

    chunk_size: int | None = 512

    def __post_init__(self) -> None:
        _check_chunk_size(self.chunk_size, "vocabulary columns")

    def __call__(self, model: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        return fused_logprobs(hidden, _head_weight(model.output), targets, temperature, self.chunk_size).float()


def chunked_logprobs(logits: Tensor, targets: Tensor, temperature: float, chunk_size: int | None) -> Tensor:
    """Log-probabilities ``[T]`` of ``targets [T]`` int64 under ``logits [T, V] / temperature``, nats.

    fp32 (float64 for float64 logits), differentiable in ``logits``. T may be 0.
    """
    return _ChunkedLogprobs.apply(logits, targets, temperature, chunk_size)


def fused_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_size: int | None
) -> Tensor:
    """``chunked_logprobs`` of the logits ``hidden [T, D] @ weight [V, D].T``; differentiable in both."""
    return _FusedLogprobs.apply(hidden, weight, targets, temperature, chunk_size)


class _ChunkedLogprobs(torch.autograd.Function):
    """One node for all chunks: a node each would clone its slice and pad each slice's gradient to full size."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, chunk_size: int | None) -> Tensor:
        logprobs, logsumexp = _log_softmax_at(targets, logits, temperature, chunk_size)
        ctx.save_for_backward(logits, targets, logsumexp)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, logsumexp = ctx.saved_tensors
        grad = grad / ctx.temperature
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(len(logits), ctx.chunk_size):
            grad_logits[rows] = _grad_logits(
                logits[rows], logsumexp[rows], ctx.temperature, grad[rows], targets[rows], grad[rows]
            )
        return grad_logits, None, None, None


class _FusedLogprobs(torch.autograd.Function):
    """Blocks of logits in the model's dtype, and of each a quarter of the rows at a time in fp32."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_size: int | None
    ) -> Tensor:
        chosen = torch.zeros(len(hidden), dtype=_compute_dtype(hidden), device=hidden.device)
        logsumexp = torch.full_like(chosen, -torch.inf)
        for columns in _chunks(len(weight), chunk_size):
            inside, places = _within(targets, columns)
            logits = hidden @ weight[columns].T
            logprobs, of_block = _log_softmax_at(places, logits, temperature, _quarter(hidden))
            chosen = torch.where(inside, logprobs + of_block, chosen)
            logsumexp = torch.logaddexp(logsumexp, of_block)
            del logits  # or it would live until the next one is made
        ctx.save_for_backward(hidden, weight, targets, logsumexp)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        return chosen - logsumexp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, targets, logsumexp = ctx.saved_tensors
        grad = grad / ctx.temperature
        grad_hidden = torch.zeros_like(hidden, dtype=grad.dtype)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for columns in _chunks(len(weight), ctx.chunk_size):
            inside, places = _within(targets, columns)
            grad_chosen = grad * inside
            block = hidden @ weight[columns].T  # logits, then their gradient in the same memory
            for rows in _chunks(len(hidden), _quarter(hidden)):
                block[rows] = _grad_logits(
                    block[rows], logsumexp[rows], ctx.temperature, grad[rows], places[rows], grad_chosen[rows]
                )
                grad_hidden[rows] += block[rows] @ weight[columns]
            if grad_weight is not None:
                torch.mm(block.T, hidden, out=grad_weight[columns])
            del block
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None


def _log_softmax_at(
    places: Tensor, logits: Tensor, temperature: float, chunk_size: int | None
) -> tuple[Tensor, Tensor]:
    """Of the rows of ``logits [n, m] / temperature``: log-softmax at ``places [n]``, and log-sum-exp, both ``[n]``."""
    at_places = logits.gather(1, places[:, None])[:, 0].to(_compute_dtype(logits)) / temperature
    logprobs = torch.empty_like(at_places)
    for rows in _chunks(len(logits), chunk_size):
        scaled = logits[rows].to(logprobs.dtype) / temperature
        logprobs[rows] = scaled.log_softmax(dim=1).gather(1, places[rows, None])[:, 0]
        del scaled
    return logprobs, at_places - logprobs


def _grad_logits(
    logits: Tensor, logsumexp: Tensor, temperature: float, grad: Tensor, places: Tensor, grad_chosen: Tensor
) -> Tensor:
    """``grad_chosen [n]`` at ``places [n]`` less ``grad [n]`` times the softmax, fp32: one new ``[n, m]``."""
    result = logits.to(grad.dtype, copy=True)
    torch.add(-logsumexp[:, None], result, alpha=1 / temperature, out=result).exp_()
    return result.mul_(-grad[:, None]).scatter_add_(1, places[:, None], grad_chosen[:, None])


def _within(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Whether a target lies in the block of ``columns``, and its place there (any place where it does not)."""
    inside = (targets >= columns.start) & (targets < columns.stop)
    return inside, (targets - columns.start).clamp(0, columns.stop - columns.start - 1)


def _chunks(length: int, chunk_size: int | None) -> Iterator[slice]:
    step = chunk_size or max(length, 1)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _quarter(hidden: Tensor) -> int:
    return max(-(-len(hidden) // 4), 1)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _head_weight(output: nn.Module | TiedLinear) -> Tensor:
    linear = output.tied_module if isinstance(output, TiedLinear) else output
    if isinstance(output, TiedLinear) or (isinstance(linear, nn.Linear) and linear.bias is None):
        return linear.weight
    raise ConfigError(
        f"logprobs.head: got FusedLinearHead for a model whose output is {type(output).__name__}, expected a linear "
        "map without bias (nn.Linear, TiedLinear); use dev.chunked_logprobs.ChunkedHead"
    )


def _check_chunk_size(chunk_size: int | None, unit: str) -> None:
    if chunk_size is not None and chunk_size < 1:
        raise ConfigError(f"chunk_size: got {chunk_size}, expected a number of {unit} >= 1, or null for one chunk")

"""Linear layers for few rows at a time, on CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torchtune.modules import TiedLinear, TransformerDecoder

from torchtune_grpo.models.internals import lm_head


@contextmanager
def onednn_linears(model: TransformerDecoder, *, whole: bool) -> Iterator[Callable[[Tensor], Tensor]]:
    """Inside the block linear layers on CPU multiply with oneDNN; yields the LM head, ``[n, D] -> logits [n, V]``.

    PyTorch multiplies fp32 matrices on CPU with MKL, which lays out the weights anew at every call. oneDNN takes them
    as they are, or laid out once: measured on SmolLM2's layers, 1.3 times as fast at 64 rows and 2 to 4 times at 2 to
    8 (``benchmarks/rollout.py``). Subclasses of ``nn.Linear``, other dtypes and other devices are left alone.

    ``whole``: parameters lie whole on every rank, and are laid out at entry; the copy takes the room that gradients
    take in the update. Otherwise each forward has gathered them anew, and they are taken as they are.
    No gradients; call it without autograd.
    """
    linears = [m for m in model.modules() if type(m) is nn.Linear and _supported(m.weight)]
    for linear in linears:
        linear.forward = _bound(linear, whole)
    output = model.output
    head: Callable[[Tensor], Tensor] = output
    if isinstance(output, TiedLinear) and _supported(lm_head(model)):
        packed = _packed(lm_head(model)) if whole else None
        head = lambda hidden: _multiply(hidden, lm_head(model) if packed is None else packed)  # noqa: E731
    try:
        yield head
    finally:
        for linear in linears:
            del linear.forward


def _supported(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def _bound(linear: nn.Linear, whole: bool) -> Callable[[Tensor], Tensor]:
    packed = _packed(linear.weight) if whole else None
    return lambda x: _multiply(x, linear.weight if packed is None else packed, linear.bias)


def _packed(weight: Tensor) -> Tensor:
    """``weight [V, D]`` in blocks, as oneDNN wants it for any number of rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 64)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [..., D] -> [..., V]``; the operator that torch.compile puts in the place of linear layers at inference."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

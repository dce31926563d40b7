"""Linear layers for few rows at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torchtune.modules import TiedLinear, TransformerDecoder

from torchtune_grpo.models.internals import lm_head


@contextmanager
def weights_first(model: TransformerDecoder) -> Iterator[None]:
    """Inside the block linear layers compute ``(W x^T)^T``: on CPU, the faster order for the few rows of decoding.

    MKL packs the right-hand matrix of a product at every call. With the weight on the left that is the small one:
    measured on SmolLM2's layers, 1.35 times as fast at 64 rows and 4 times at 2. Layers that widen return a transposed
    view, which the layer that narrows again takes as it is; others return rows, for the norms that follow. Subclasses
    of ``nn.Linear`` and CUDA, where the order makes no difference, are left alone.
    """
    linears = [m for m in model.modules() if type(m) is nn.Linear and m.weight.device.type == "cpu"]
    for linear in linears:
        linear.forward = _bound(linear)
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward


def _bound(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    widens = linear.out_features > linear.in_features

    def forward(x: Tensor) -> Tensor:
        out = _weight_first(x, linear.weight, linear.bias)
        return out if widens else out.contiguous()

    return forward


def _weight_first(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [..., D] -> [..., V]`` for ``weight [V, D]``, as a transposed view."""
    columns = x.flatten(0, -2).t()
    out = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
    return out.t().unflatten(0, x.shape[:-1])


def head(model: TransformerDecoder, hidden: Tensor) -> Tensor:
    """Logits ``[n, V]`` of ``hidden [n, D]``, after ``model.norm``; in the order of ``weights_first`` on CPU."""
    output = model.output
    plain = isinstance(output, TiedLinear) or (type(output) is nn.Linear and output.bias is None)
    if hidden.device.type != "cpu" or not plain:
        return output(hidden)
    return _weight_first(hidden, lm_head(model)).contiguous()

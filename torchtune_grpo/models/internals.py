"""The one place that touches what torchtune does not export.

torchtune is no longer maintained and its version is pinned, so its private names are stable, but they are kept
here: the tensor names of the Qwen2 family, and two objects inside a ``TransformerDecoder`` that are swapped for
the length of a ``with`` block instead of copying the model's code:

- each attention's KV cache and attention kernel (generation with a shared prompt cache, compact layouts);
- the decoder's ``unembed`` (heads that read only some positions, or never build all logits). It runs inside the
  decoder's forward, where FSDP holds the head's weight unsharded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn
from torchtune.models.qwen2._convert_weights import _FROM_HF as QWEN2_NAMES
from torchtune.modules import MultiHeadAttention, TransformerDecoder

__all__ = ["QWEN2_NAMES", "AttentionKernel", "attention_swapped", "unembed_swapped"]


class AttentionKernel(Protocol):
    """Stands in for one layer's KV cache and attention.

    ``update(k, v)`` sees keys and values ``[b, n_kv, s, h]`` before grouped heads are expanded, ``attend(q, k, v)``
    sees queries ``[b, n_heads, s, h]`` and returns the same shape. torchtune expands what ``update`` returns by
    copying, so an implementation that keeps the keys itself returns them unchanged and ignores ``k`` and ``v``.
    """

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@contextmanager
def attention_swapped(model: TransformerDecoder, make: Callable[[], AttentionKernel]) -> Iterator[list]:
    """Every self-attention of ``model`` runs on its own ``make()`` inside the block; yields these in layer order.

    Inside the block the decoder insists on ``mask`` and ``input_pos``; the mask's value is ignored.
    """
    layers = [m for m in model.modules() if isinstance(m, MultiHeadAttention)]
    kernels = [make() for _ in layers]
    saved = [(m.kv_cache, m.cache_enabled, m._attention_call) for m in layers]
    try:
        for attention, kernel in zip(layers, kernels, strict=True):
            attention.kv_cache, attention.cache_enabled = kernel, True
            attention._attention_call = _ignoring_mask(kernel)
        yield kernels
    finally:
        for attention, (cache, enabled, call) in zip(layers, saved, strict=True):
            attention.kv_cache, attention.cache_enabled, attention._attention_call = cache, enabled, call


def _ignoring_mask(kernel: AttentionKernel) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, mask: object, dropout_p: float, is_causal: bool) -> Tensor:
        return kernel.attend(q, k, v)

    return call


@contextmanager
def unembed_swapped(model: TransformerDecoder, unembed: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """``model(tokens)`` returns ``unembed(h)`` inside the block, ``h [b, s, D]`` being the last layer's output.

    ``unembed`` applies ``model.norm`` and ``model.output`` itself, to the positions it wants.
    """
    assert isinstance(model, nn.Module) and "unembed" not in vars(model)
    model.unembed = unembed
    try:
        yield
    finally:
        del model.unembed

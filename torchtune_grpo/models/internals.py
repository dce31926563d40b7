"""The one place that touches what torchtune does not export.

torchtune is no longer maintained and its version is pinned, so its private names are stable, but they are kept
here: the tensor names of the Qwen2 family, and three places inside a ``TransformerDecoder`` where other code is
put instead of copying the model's:

- each attention's KV cache and attention kernel, for the length of a ``with`` block (generation with a shared
  prompt cache);
- each attention's kernel for good, but for those forwards alone whose ``mask`` says so (training on several
  sequences laid end to end);
- the decoder's ``unembed``, for the length of a ``with`` block (heads that read only some positions, or never build
  all logits). It runs inside the decoder's forward, where FSDP holds the head's weight unsharded.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torchtune.models.qwen2._convert_weights import _FROM_HF as QWEN2_NAMES
from torchtune.modules import MultiHeadAttention, TransformerDecoder

__all__ = [
    "QWEN2_NAMES",
    "AttentionKernel",
    "AttentionPattern",
    "attention_swapped",
    "forward_with_pattern",
    "lm_head",
    "unembed_swapped",
]


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


class AttentionPattern(ABC):
    """Which tokens of one forward attend to which, and how that is computed, the same in every layer.

    Handed to the model in the place of a mask, so that whatever runs a layer again (activation checkpointing, in
    the backward) runs it with the same pattern.
    """

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q [1, n_heads, T, h]``, ``k`` and ``v [1, n_kv, T, h]`` (grouped heads not expanded; head ``i`` of the
        queries belongs to head ``i // (n_heads // n_kv)`` of the keys) -> ``[1, n_heads, T, h]``."""


class _PatternDispatch:
    """One layer's attention kernel: a pattern attends by itself, any other mask goes where it went before."""

    def __init__(self, attention: MultiHeadAttention) -> None:
        self._other = attention._attention_call
        self._queries_per_key = attention.num_heads // attention.num_kv_heads

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: object, dropout_p: float, is_causal: bool) -> Tensor:
        if isinstance(mask, AttentionPattern):
            # torchtune has expanded grouped heads by copying; one copy of each is as good, its gradient included.
            return _attend(mask, q, k[:, :: self._queries_per_key], v[:, :: self._queries_per_key])
        return self._other(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal)


@torch.compiler.disable
def _attend(pattern: AttentionPattern, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Kept out of compiled layers: every pattern has other shapes, and each would be compiled anew."""
    return pattern.attend(q, k, v)


def forward_with_pattern(
    model: TransformerDecoder, tokens: Tensor, positions: Tensor, pattern: AttentionPattern
) -> Tensor:
    """``model(tokens)`` with ``pattern`` in the place of causal attention; ``tokens``, ``positions [1, T]`` int64.

    T may exceed ``model.max_seq_len``, the positions may not. The model's layers are prepared once and stay so;
    forwards with any other mask, or none, are as before. Collectives: those of the model's forward.
    """
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and not isinstance(module._attention_call, _PatternDispatch):
            module._attention_call = _PatternDispatch(module)
    max_seq_len = model.max_seq_len
    model.max_seq_len = max(max_seq_len, tokens.shape[1])  # the decoder holds it against T
    try:
        return model(tokens, mask=pattern, input_pos=positions)
    finally:
        model.max_seq_len = max_seq_len


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


def lm_head(model: TransformerDecoder) -> Tensor:
    """The LM head's weight ``[V, D]``, tied or not. Whole inside the model's forward, a shard of it elsewhere."""
    return getattr(model.output, "tied_module", model.output).weight

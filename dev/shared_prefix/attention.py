"""Attention over a compact layout, one interface and three backends.

In all of them prompts attend to themselves, causal, and a response token attends to its prompt and to its own response
up to itself: causal and aligned at the bottom right, since the queries are the last of the keys. The gradient of
every response's keys and values is summed into the one copy of its prompt.

A backend turns a layout into a pattern once a micro-batch; the model then calls the pattern in every layer.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from dev.shared_prefix.layout import CompactLayout, Group
from torchtune_grpo.config import ConfigError
from torchtune_grpo.models.internals import AttentionPattern

CAUSAL = (-1, 0)  # varlen_attn's window: all keys to the left, none to the right of the bottom right diagonal


class AttentionBackend(Protocol):
    """Prepares the attention of one layout, whose tensors are on the model's device. No collective.

    Raises:
        ConfigError: this backend cannot run on that device.
    """

    def __call__(self, layout: CompactLayout) -> AttentionPattern: ...


# --- SDPA: CPU, and the reference ---


@dataclass(frozen=True, kw_only=True)
class SDPABackend:
    """``scaled_dot_product_attention``, on every device and dtype: two calls a group, responses padded to the longest.

    The way to run on CPU, where both calls are flash kernels. On CUDA it is the reference for the other backends.
    """

    def __call__(self, layout: CompactLayout) -> AttentionPattern:
        return _GroupedSDPA(layout)


class _GroupedSDPA(AttentionPattern):
    def __init__(self, layout: CompactLayout) -> None:
        self._blocks = [_Responses(group, layout.positions.device) for group in layout.groups]
        self._sizes = [size for group in layout.groups for size in (group.prompt, sum(group.responses))]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Splits rather than slices: their backward is one concatenation, not a tensor of zeros for each.
        parts = list(zip(*(x.split(self._sizes, dim=2) for x in (q, k, v)), strict=True))
        outputs = []
        for prompt, responses, block in zip(parts[::2], parts[1::2], self._blocks, strict=True):
            outputs.append(F.scaled_dot_product_attention(*prompt, is_causal=True, enable_gqa=True))
            outputs.append(block.attend(*responses, *prompt[1:]))
        return torch.cat(outputs, dim=2)


class _Responses:
    """The responses of one group as a rectangle ``[n, heads, longest, h]``.

    Padding is on the right of queries and keys alike, so no real query sees a padded key, and one mask serves all rows.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        lengths, longest = torch.tensor(group.responses), max(group.responses)
        self._shape = (len(lengths), longest)
        real = torch.arange(longest) < lengths[:, None]
        self._even = bool(real.all())
        if not self._even:
            self._places = (real.flatten().cumsum(0) - 1).to(device)  # padding repeats the token before it
            self._real = real.flatten().nonzero().squeeze(1).to(device)
        # [longest, prompt + longest]
        mask = torch.ones(longest, group.prompt + longest, dtype=torch.bool).tril(group.prompt)
        self._mask = mask.to(device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor) -> Tensor:
        """``q [1, n_heads, sum of lengths, h]`` and so on; returns the shape of ``q``."""
        n, longest = self._shape
        kv_heads = k.shape[1]
        keys = torch.cat([prompt_k.expand(n, -1, -1, -1), self._pad(k)], dim=2)
        values = torch.cat([prompt_v.expand(n, -1, -1, -1), self._pad(v)], dim=2)
        # Queries of one key head one below the other: a taller matrix, and the kernel need not know of grouped heads.
        queries = self._pad(q).unflatten(1, (kv_heads, -1)).flatten(2, 3)
        mask = self._mask.repeat(queries.shape[2] // longest, 1)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        out = out.unflatten(2, (-1, longest)).flatten(1, 2)
        out = out.transpose(1, 2).flatten(0, 1)  # [n * longest, n_heads, h]
        if not self._even:
            out = out.index_select(0, self._real)
        return out.transpose(0, 1)[None]

    def _pad(self, x: Tensor) -> Tensor:
        """``[1, heads, sum of lengths, h]`` -> ``[n, heads, longest, h]``."""
        x = x[0].transpose(0, 1)
        if not self._even:
            x = x.index_select(0, self._places)
        return x.unflatten(0, self._shape).transpose(1, 2)


# --- Varlen: CUDA, fp16 and bf16 ---


@dataclass(frozen=True, kw_only=True)
class VarlenBackend:
    """``torch.nn.attention.varlen`` (flash attention): two calls in all, nothing is padded. CUDA, bf16 or fp16."""

    def __call__(self, layout: CompactLayout) -> AttentionPattern:
        if layout.positions.device.type != "cuda":
            raise ConfigError(
                f"logprobs.backend: got VarlenBackend on {layout.positions.device.type}, expected device: cuda; "
                "dev.shared_prefix.SDPABackend runs everywhere"
            )
        return VarlenPattern(layout, flash_kernel)


class VarlenPattern(AttentionPattern):
    """``kernel`` is called like ``varlen_attn``."""

    def __init__(self, layout: CompactLayout, kernel: Callable[..., Tensor]) -> None:
        self._kernel = kernel
        self._prompts = (layout.token_responses < 0).nonzero().squeeze(1)
        self._responses, self._keys = layout.targets, layout.keys
        self._order = torch.cat([self._prompts, self._responses]).argsort()
        longest_prompt = max(group.prompt for group in layout.groups)
        longest_response = max(length for group in layout.groups for length in group.responses)
        self._of_prompts = (layout.cu_prompts, layout.cu_prompts, longest_prompt, longest_prompt)
        self._of_responses = (layout.cu_responses, layout.cu_keys, longest_response, layout.longest_row)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [T, heads, h]
        of_prompts = [x.index_select(0, self._prompts) for x in (q, k, v)]
        of_responses = q.index_select(0, self._responses), gather_rows(k, self._keys), gather_rows(v, self._keys)
        prompts = self._kernel(*of_prompts, *self._of_prompts, window_size=CAUSAL, enable_gqa=True)
        responses = self._kernel(*of_responses, *self._of_responses, window_size=CAUSAL, enable_gqa=True)
        out = torch.cat([prompts, responses]).index_select(0, self._order)
        return out.transpose(0, 1)[None]


def flash_kernel(q: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """``varlen_attn``; raises ConfigError for a dtype that it does not know."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(f"dtype: got {q.dtype}, expected bf16 with dev.shared_prefix.VarlenBackend (a flash kernel)")
    return varlen_attn(q, *arguments, **named)


# --- FlexAttention: CUDA; values alone on CPU ---


@dataclass(frozen=True, kw_only=True)
class FlexBackend:
    """FlexAttention with a block mask: one call, no gather at all. CUDA; on CPU it has no backward.

    Compiled on CUDA, on its first call. Building the mask takes a bool ``[T, T]`` for a moment.
    """

    def __call__(self, layout: CompactLayout) -> AttentionPattern:
        return _FlexPattern(layout)


class _FlexPattern(AttentionPattern):
    def __init__(self, layout: CompactLayout) -> None:
        size, device = layout.num_tokens, layout.positions.device
        self._mask: BlockMask = create_block_mask(visible(layout), None, None, size, size, device=device)
        self._kernel = _compiled_flex() if device.type == "cuda" else flex_attention

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.device.type == "cpu" and q.requires_grad:
            raise ConfigError(
                "logprobs.backend: got FlexBackend on cpu, where FlexAttention has no backward; "
                "expected dev.shared_prefix.SDPABackend, or device: cuda"
            )
        return self._kernel(q, k, v, block_mask=self._mask, enable_gqa=True)


def visible(layout: CompactLayout) -> Callable[..., Tensor]:
    """FlexAttention's mask function: whether compact token ``query`` attends to ``key``, True = yes."""
    groups, responses = layout.token_groups, layout.token_responses

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        of_prompt_or_self = (responses[key] < 0) | (responses[query] == responses[key])
        return (query >= key) & (groups[query] == groups[key]) & of_prompt_or_self

    return mask


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


# --- Gather ---


def gather_rows(source: Tensor, index: Tensor) -> Tensor:
    """``source[index]`` along the first axis; a row that ``index`` repeats gets the sum of the gradients.

    The sum is taken in fp32 (float64 for float64) and rounded once: added up in bf16, the gradients of many
    responses would lose their small ones.
    """
    return _GatherRows.apply(source, index)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = source.shape[0]
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.new_zeros((ctx.num_rows, *gradient.shape[1:]), dtype=wide)
        total.index_add_(0, index, gradient.to(wide))
        return total.to(gradient.dtype), None

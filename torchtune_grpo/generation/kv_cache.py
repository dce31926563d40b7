"""Keys and values of a rollout: each prompt's once, each response's own.

Attention of a response token runs over two blocks of keys, its prompt's (shared by the group) and its own
response's, under one softmax. Grouped-query heads are never expanded.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROWTH = 64  # response positions allocated at a time


@dataclass
class DecodingLayout:
    """Which rows are being computed, shared by all layers.

    ``prompt_mask [B, P]`` True = real prompt key; ``prompt_of_row [n]`` int64; ``slot_of_row [n]`` int64: the row's
    place in a rectangle ``[B, width]`` of rows a prompt, in which queries meet their prompt's keys.
    """

    prompt_mask: Tensor
    prompt_of_row: Tensor
    slot_of_row: Tensor
    width: int

    @classmethod
    def full(cls, prompt_mask: Tensor, group_size: int) -> "DecodingLayout":
        num_prompts = prompt_mask.shape[0]
        rows = torch.arange(num_prompts * group_size, device=prompt_mask.device)
        return cls(prompt_mask, rows // group_size, rows, group_size)

    def keep(self, rows: Tensor) -> None:
        """Only the rows named by ``rows`` (ascending int64 indices into the present ones) go on."""
        self.prompt_of_row = self.prompt_of_row[rows]
        counts = torch.bincount(self.prompt_of_row, minlength=self.prompt_mask.shape[0])
        first = counts.cumsum(0) - counts
        rank_in_group = torch.arange(len(rows), device=rows.device) - first[self.prompt_of_row]
        self.width = int(counts.max())
        self.slot_of_row = self.prompt_of_row * self.width + rank_in_group

    @property
    def is_rectangle(self) -> bool:
        return len(self.slot_of_row) == self.prompt_mask.shape[0] * self.width

    def by_prompt(self, rows: Tensor) -> Tensor:
        """``[n, ...]`` -> ``[B, width, ...]``, zeros where a prompt has fewer rows."""
        shape = (self.prompt_mask.shape[0], self.width, *rows.shape[1:])
        if self.is_rectangle:
            return rows.view(shape)
        out = rows.new_zeros((shape[0] * shape[1], *rows.shape[1:]))
        return out.index_copy(0, self.slot_of_row, rows).view(shape)

    def by_row(self, rectangle: Tensor) -> Tensor:
        """``[B, width, ...]`` -> ``[n, ...]``, the inverse of ``by_prompt``."""
        flat = rectangle.flatten(0, 1)
        return flat if self.is_rectangle else flat[self.slot_of_row]


class LayerCache:
    """One attention layer's keys and values; an ``AttentionKernel`` that serves prefill, then decoding.

    Prefill: ``[B, P]`` prompts that start at position 0, causal, their keys kept. Decoding: one token a row.
    """

    def __init__(self, max_response: int) -> None:
        self.max_response = max_response
        self.layout: DecodingLayout | None = None  # set when decoding starts
        self.length = 0  # response positions that hold keys

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.layout is None:
            self.prompt_k, self.prompt_v = k, v
        else:
            self._append(k, v)
        return k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.layout is None:
            return F.scaled_dot_product_attention(q, self.prompt_k, self.prompt_v, is_causal=True, enable_gqa=True)
        return self._decode(q)

    def keep(self, rows: Tensor) -> None:
        """Drops the response keys of rows that ended. ``rows``: as in ``DecodingLayout.keep``."""
        if self.length:
            self.k = self.k[rows, :, : self.length]
            self.v = self.v[rows, :, : self.length]

    def _append(self, k: Tensor, v: Tensor) -> None:
        if self.length == 0:
            self.k, self.v = k[:, :, :0], v[:, :, :0]
        if self.length == self.k.shape[2]:
            extra = min(GROWTH, self.max_response - self.length)
            self.k, self.v = F.pad(self.k, (0, 0, 0, extra)), F.pad(self.v, (0, 0, 0, extra))
        self.k[:, :, self.length] = k[:, :, 0]
        self.v[:, :, self.length] = v[:, :, 0]
        self.length += 1

    def _decode(self, q: Tensor) -> Tensor:
        """``q [n, n_heads, 1, h]`` -> the same shape. The softmax is fp32."""
        layout = self.layout
        n, num_heads, _, head_dim = q.shape
        kv_heads = self.prompt_k.shape[1]
        q = q.reshape(n, kv_heads, num_heads // kv_heads, head_dim) / math.sqrt(head_dim)
        # [B, kv, width * q_per_kv, h] against [B, kv, P, h]
        rectangle = layout.by_prompt(q).transpose(1, 2).flatten(2, 3)
        scores = (rectangle @ self.prompt_k.transpose(-1, -2)).float()
        scores = scores.masked_fill(~layout.prompt_mask[:, None, None], -torch.inf)
        scores = layout.by_row(scores.unflatten(2, (layout.width, -1)).transpose(1, 2))
        own = (q @ self.k[:, :, : self.length].transpose(-1, -2)).float()
        weights = torch.softmax(torch.cat([scores, own], dim=-1), dim=-1).to(self.v.dtype)
        prompt_width = scores.shape[-1]
        prompt_weights, own_weights = weights[..., :prompt_width], weights[..., prompt_width:]
        rectangle = layout.by_prompt(prompt_weights).transpose(1, 2).flatten(2, 3) @ self.prompt_v
        out = layout.by_row(rectangle.unflatten(2, (layout.width, -1)).transpose(1, 2))
        out = out + own_weights @ self.v[:, :, : self.length]
        return out.reshape(n, num_heads, 1, head_dim)

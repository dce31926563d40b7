"""Keys and values of a rollout: each prompt's once, each response's own.

Attention of a response token runs over two blocks of keys, its prompt's (shared by the group) and its own
response's, under one softmax. Grouped-query heads are never expanded.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What every layer keeps when rows are dropped: ``prompts [B']`` int64, indices into the present prompts, and
    ``slots [B', width']`` int64, the present slot that each new one takes over, counted over all prompts."""

    prompts: Tensor
    slots: Tensor


@dataclass
class DecodingLayout:
    """Which rows are being computed and where they stand; shared by all layers.

    Rows stand in a rectangle ``[B, width]`` of slots, siblings side by side. Where a prompt has fewer rows than
    ``width``, its last slots hold copies that nobody reads. All rows have responses of the same ``length``.

    ``prompt_mask [B, P]`` True = real prompt key; ``prompt_of_row [n]`` int64; ``slot_of_row [n]`` int64, counted over
    all prompts. ``fixed_shapes``: every token attends to all positions allocated, those not yet written masked, and
    the next one to write is read from ``place [1]`` int64, so that a captured CUDA graph can be replayed.
    """

    prompt_mask: Tensor
    prompt_of_row: Tensor
    slot_of_row: Tensor
    width: int
    fixed_shapes: bool
    length: int = 0
    place: Tensor = field(init=False)
    is_rectangle: bool = field(init=False)
    is_padded: bool = field(init=False)  # whether any prompt is shorter than P

    def __post_init__(self) -> None:
        self.place = torch.zeros(1, dtype=torch.int64, device=self.prompt_mask.device)
        self._note_shape()

    @classmethod
    def full(cls, prompt_mask: Tensor, group_size: int, *, fixed_shapes: bool = False) -> "DecodingLayout":
        rows = torch.arange(prompt_mask.shape[0] * group_size, device=prompt_mask.device)
        return cls(prompt_mask, rows // group_size, rows, group_size, fixed_shapes)

    @property
    def num_prompts(self) -> int:
        return self.prompt_mask.shape[0]

    def advance(self) -> None:
        """One more response position is written."""
        self.length += 1
        self.place += 1

    def keep(self, rows: Tensor) -> Kept:
        """Only the rows named by ``rows`` (ascending int64 indices into the present ones) go on."""
        old_slots = self.slot_of_row[rows]
        prompts, self.prompt_of_row, counts = torch.unique(
            self.prompt_of_row[rows], return_inverse=True, return_counts=True
        )
        first = counts.cumsum(0) - counts
        self.width = int(counts.max())
        place = torch.arange(self.width, device=rows.device).expand(len(prompts), -1)
        slots = old_slots[first[:, None] + torch.where(place < counts[:, None], place, 0)]
        self.slot_of_row = self.prompt_of_row * self.width + torch.arange(len(rows), device=rows.device)
        self.slot_of_row -= first[self.prompt_of_row]
        self.prompt_mask = self.prompt_mask[prompts]
        self._note_shape()
        return Kept(prompts=prompts, slots=slots)

    def by_prompt(self, rows: Tensor) -> Tensor:
        """``[n, heads, h]`` -> ``[B, heads, width, h]``, zeros in slots without a row."""
        if not self.is_rectangle:
            slots = rows.new_zeros((self.num_prompts * self.width, *rows.shape[1:]))
            rows = slots.index_copy_(0, self.slot_of_row, rows)
        return rows.unflatten(0, (self.num_prompts, self.width)).transpose(1, 2)

    def by_row(self, rectangle: Tensor) -> Tensor:
        """``[B, heads, width, h]`` -> ``[n, heads, h]``, the inverse of ``by_prompt``."""
        slots = rectangle.transpose(1, 2).flatten(0, 1)
        return slots if self.is_rectangle else slots[self.slot_of_row]

    def _note_shape(self) -> None:
        self.is_rectangle = len(self.slot_of_row) == self.num_prompts * self.width
        self.is_padded = not bool(self.prompt_mask.all())


class LayerCache:
    """One attention layer's keys and values; an ``AttentionKernel`` that serves prefill, then decoding.

    Prefill: ``[B, P]`` prompts that start at position 0, causal, their keys kept as ``prompt_k``, ``prompt_v``
    ``[B, kv_heads, P, h]``. Decoding: one token a row, its keys kept in ``k``, ``v [B, kv_heads, width, capacity, h]``.
    """

    def __init__(self) -> None:
        self.layout: DecodingLayout | None = None

    def start_decoding(self, layout: DecodingLayout) -> None:
        self.layout = layout
        batch, heads, _, head_dim = self.prompt_k.shape
        self.k = self.prompt_k.new_empty(batch, heads, layout.width, 0, head_dim)
        self.v = torch.empty_like(self.k)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.prompt_k, self.prompt_v, self.k, self.v))

    def reserve(self, capacity: int) -> None:
        """Room for responses of ``capacity`` tokens."""
        extra = capacity - self.k.shape[3]
        self.k, self.v = F.pad(self.k, (0, 0, 0, extra)), F.pad(self.v, (0, 0, 0, extra))

    def keep(self, kept: Kept) -> None:
        """Drops the keys of prompts and rows that ended."""
        if len(kept.prompts) < len(self.prompt_k):
            self.prompt_k, self.prompt_v = self.prompt_k[kept.prompts], self.prompt_v[kept.prompts]
        self.k, self.v = _take_slots(self.k, kept.slots), _take_slots(self.v, kept.slots)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.layout is None:
            # torchtune hands over a transposed view, which every token of every layer would copy
            self.prompt_k, self.prompt_v = k.contiguous(), v.contiguous()
        else:
            self._append(self.k, k[:, :, 0])
            self._append(self.v, v[:, :, 0])
        return k[:, :, :0], v[:, :, :0]  # nothing for torchtune to expand

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.layout is None:
            return F.scaled_dot_product_attention(q, self.prompt_k, self.prompt_v, is_causal=True, enable_gqa=True)
        return self._decode(q)

    def _append(self, cache: Tensor, rows: Tensor) -> None:
        rectangle = self.layout.by_prompt(rows)
        if self.layout.fixed_shapes:
            cache.index_copy_(3, self.layout.place, rectangle.unsqueeze(3))
        else:
            cache[:, :, :, self.layout.length] = rectangle

    def _decode(self, q: Tensor) -> Tensor:
        """``q [n, n_heads, 1, h]`` -> the same shape. The softmax is fp32."""
        layout = self.layout
        n, num_heads, _, head_dim = q.shape
        batch, kv_heads, prompt_width, _ = self.prompt_k.shape
        length = self.k.shape[3] if layout.fixed_shapes else layout.length + 1
        # [n, kv, q_per_kv * h] -> [B * kv, width * q_per_kv, h]: the prompt's keys meet all queries of a group at once
        q = layout.by_prompt(q.reshape(n, kv_heads, -1)).reshape(batch * kv_heads, -1, head_dim)
        scale = 1 / math.sqrt(head_dim)
        prompt = _scaled_bmm(q, self.prompt_k.flatten(0, 1).transpose(1, 2), scale)
        if layout.is_padded:
            hidden = ~layout.prompt_mask[:, None, None]
            prompt.unflatten(0, (batch, kv_heads)).masked_fill_(hidden, -torch.inf)
        own_k, own_v = (t.flatten(0, 2)[:, :length] for t in (self.k, self.v))
        own = _scaled_bmm(q.reshape(len(own_k), -1, head_dim), own_k.transpose(1, 2), scale)
        if layout.fixed_shapes:
            own.masked_fill_(torch.arange(length, device=own.device) > layout.place, -torch.inf)
        scores = torch.cat([prompt, own.reshape(*prompt.shape[:2], length)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        own_weights = weights[..., prompt_width:].unflatten(1, (layout.width, -1)).flatten(0, 1)
        out = torch.bmm(own_weights, own_v).reshape(q.shape)
        out = torch.baddbmm(out, weights[..., :prompt_width], self.prompt_v.flatten(0, 1))
        return layout.by_row(out.view(batch, kv_heads, layout.width, -1)).reshape(n, num_heads, 1, head_dim)


def _scaled_bmm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(a.new_empty(()).expand(len(a), a.shape[1], b.shape[2]), a, b, beta=0, alpha=scale)


def _take_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """The slots named by ``slots [B', width']`` of ``cache [B, heads, width, ...]``, in the same order of axes."""
    width = cache.shape[2]
    return cache[slots // width, :, slots % width].transpose(1, 2).contiguous()

"""Rotary embeddings for one token a row."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torchtune.models.llama3_1 import Llama3ScaledRoPE
from torchtune.modules import RotaryPositionalEmbeddings, TransformerDecoder


@contextmanager
def rotations_shared(model: TransformerDecoder) -> Iterator[None]:
    """Inside the block rotary embeddings of pairs (2i, 2i + 1) are one complex product a call.

    The angles of a token are looked up once for all layers (torchtune's builders share the module). With a few numbers
    to rotate, what torchtune's own forward costs is the number of its kernels. Other kinds of embedding (Qwen's halves)
    are left alone.
    """
    kinds = (RotaryPositionalEmbeddings, Llama3ScaledRoPE)
    embeddings = [m for m in model.modules() if type(m) in kinds]
    for embedding in embeddings:
        embedding.forward = _Rotation(embedding.cache)
    try:
        yield
    finally:
        for embedding in embeddings:
            del embedding.forward


class _Rotation:
    """``table [max_seq_len, h / 2, 2]`` fp32: cos and sin."""

    def __init__(self, table: Tensor) -> None:
        self._table = torch.view_as_complex(table.float().contiguous())
        self._positions: Tensor | None = None

    def __call__(self, x: Tensor, *, input_pos: Tensor) -> Tensor:
        """``x [b, s, heads, h]``, ``input_pos [b, s]``; returns x's shape and dtype."""
        if input_pos is not self._positions:
            self._positions = input_pos
            self._angles = self._table[input_pos][:, :, None]
        pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self._angles).flatten(-2).type_as(x)

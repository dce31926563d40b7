"""Qwen3 (dense), which the pinned torchtune lacks, out of torchtune's own modules.

Source: Qwen3 Technical Report (arXiv 2505.09388). It is Qwen2 without biases, with heads whose width is a size of its
own, and with queries and keys RMS-normalised head by head *before* the rotary embedding.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torchtune.models.convert_weights import get_mapped_key
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)

from torchtune_grpo.models.internals import QWEN2_NAMES

_NAMES = QWEN2_NAMES | {
    "model.layers.{}.self_attn.q_norm.weight": "layers.{}.attn.q_proj.norm.scale",
    "model.layers.{}.self_attn.k_norm.weight": "layers.{}.attn.k_proj.norm.scale",
}
_HF_NAMES = {tune: hf for hf, tune in _NAMES.items()}


class NormedHeadsLinear(nn.Linear):
    """A projection ``[..., D] -> [..., heads * h]`` without bias whose heads are RMS-normalised, each by itself.

    The ``q_norm`` of torchtune's attention comes after its rotary embedding, this norm before it; the attention
    module stays torchtune's own, so all that swaps its cache or its kernel works here too.
    """

    def __init__(self, embed_dim: int, num_heads: int, head_dim: int, norm_eps: float) -> None:
        super().__init__(embed_dim, num_heads * head_dim, bias=False)
        self.head_dim = head_dim
        self.norm = RMSNorm(head_dim, eps=norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        heads = super().forward(x).unflatten(-1, (-1, self.head_dim))
        return self.norm(heads).flatten(-2)


def qwen3(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    rope_base: float = 1_000_000.0,
    norm_eps: float = 1e-6,
    tie_word_embeddings: bool = False,
    attn_dropout: float = 0.0,
) -> TransformerDecoder:
    """A dense Qwen3. ``head_dim`` need not be ``embed_dim / num_heads``; ``num_heads`` must divide ``embed_dim``."""
    rope = Qwen2RotaryPositionalEmbeddings(dim=head_dim, max_seq_len=max_seq_len, base=rope_base)

    def layer() -> TransformerSelfAttentionLayer:
        attention = MultiHeadAttention(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            q_proj=NormedHeadsLinear(embed_dim, num_heads, head_dim, norm_eps),
            k_proj=NormedHeadsLinear(embed_dim, num_kv_heads, head_dim, norm_eps),
            v_proj=nn.Linear(embed_dim, num_kv_heads * head_dim, bias=False),
            output_proj=nn.Linear(num_heads * head_dim, embed_dim, bias=False),
            pos_embeddings=rope,
            max_seq_len=max_seq_len,
            attn_dropout=attn_dropout,
        )
        mlp = FeedForward(
            gate_proj=nn.Linear(embed_dim, intermediate_dim, bias=False),
            down_proj=nn.Linear(intermediate_dim, embed_dim, bias=False),
            up_proj=nn.Linear(embed_dim, intermediate_dim, bias=False),
        )
        return TransformerSelfAttentionLayer(
            attention, mlp, sa_norm=RMSNorm(embed_dim, eps=norm_eps), mlp_norm=RMSNorm(embed_dim, eps=norm_eps)
        )

    tok_embeddings = nn.Embedding(vocab_size, embed_dim)
    return TransformerDecoder(
        tok_embeddings=tok_embeddings,
        layers=nn.ModuleList(layer() for _ in range(num_layers)),
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        head_dim=head_dim,
        norm=RMSNorm(embed_dim, eps=norm_eps),
        output=TiedLinear(tok_embeddings) if tie_word_embeddings else nn.Linear(embed_dim, vocab_size, bias=False),
    )


def qwen3_0_6b(max_seq_len: int = 32_768) -> TransformerDecoder:
    """Qwen3-0.6B, base or post-trained (https://huggingface.co/Qwen/Qwen3-0.6B-Base): 596 M parameters, tied head."""
    return _small(embed_dim=1024, intermediate_dim=3072, max_seq_len=max_seq_len)


def qwen3_1_7b(max_seq_len: int = 32_768) -> TransformerDecoder:
    """Qwen3-1.7B, base or post-trained (https://huggingface.co/Qwen/Qwen3-1.7B-Base): 1.72 B parameters, tied head."""
    return _small(embed_dim=2048, intermediate_dim=6144, max_seq_len=max_seq_len)


def _small(**sizes: int) -> TransformerDecoder:
    """What the two smallest have in common."""
    return qwen3(
        vocab_size=151_936,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rope_base=1_000_000.0,
        norm_eps=1e-6,
        tie_word_embeddings=True,
        **sizes,
    )


def qwen3_hf_to_tune(state_dict: Mapping[str, Tensor], **sizes: Any) -> dict[str, Tensor]:
    """Hugging Face's names to torchtune's; the tensors are the same, so ``sizes`` are not needed."""
    return {get_mapped_key(name, _NAMES): tensor for name, tensor in state_dict.items()}


def qwen3_tune_to_hf(state_dict: Mapping[str, Tensor], **sizes: Any) -> dict[str, Tensor]:
    """torchtune's names to Hugging Face's."""
    return {get_mapped_key(name, _HF_NAMES): tensor for name, tensor in state_dict.items()}

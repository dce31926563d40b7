"""The embedded default: a llama of about 0.65 M parameters that trains from scratch on two CPU cores."""

import math

from torch import nn
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules import TransformerDecoder


def tiny_llama(
    vocab_size: int,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 4,
    embed_dim: int = 128,
    intermediate_dim: int = 384,
    max_seq_len: int = 256,
) -> TransformerDecoder:
    """A small llama with tied embeddings and an init that trains at once.

    torchtune leaves embeddings at unit variance, which saturates a tied softmax of this width from the first step;
    here embeddings have std 0.04, linear layers 0.02, and the two projections that write into the residual stream
    0.02 / sqrt(2 * num_layers).
    """
    model = llama3_2(
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim,
        max_seq_len=max_seq_len,
        rope_base=10_000,
        scale_factor=1,
    )
    residual_std = 0.02 / math.sqrt(2 * num_layers)
    for name, parameter in model.named_parameters():
        if name.startswith("tok_embeddings"):
            nn.init.normal_(parameter, std=0.04)
        elif name.endswith(("attn.output_proj.weight", "mlp.w2.weight")):
            nn.init.normal_(parameter, std=residual_std)
        elif parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
    return model

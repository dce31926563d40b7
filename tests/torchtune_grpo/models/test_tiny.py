import math

import torch

from torchtune_grpo.data import tiny_tokenizer
from torchtune_grpo.models import tiny_llama


def test_tiny_llama_has_about_0_65_million_parameters() -> None:
    """Embeddings V*D; a layer 4 D^2 for attention, 3 D*F for the MLP, 2 D for its norms; a last norm D."""
    vocab, dim, hidden = tiny_tokenizer().vocab_size, 128, 384
    model = tiny_llama(vocab_size=vocab)
    by_hand = vocab * dim + 3 * (4 * dim**2 + 3 * dim * hidden + 2 * dim) + dim
    assert sum(p.numel() for p in model.parameters()) == by_hand
    assert 0.62e6 < by_hand < 0.68e6
    assert "output.weight" not in model.state_dict()  # tied


def test_tiny_llama_initialises_by_the_role_of_each_matrix() -> None:
    torch.manual_seed(0)
    for name, parameter in tiny_llama(vocab_size=200).named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        if name.startswith("tok_embeddings"):
            std = 0.04
        elif "output_proj" in name or "w2" in name:
            std = 0.02 / math.sqrt(6)
        else:
            std = 0.02
        assert abs(parameter.std().item() / std - 1) < 0.03, name
        assert abs(parameter.mean().item()) < 0.05 * std, name


def test_tiny_llama_takes_its_sizes() -> None:
    model = tiny_llama(
        vocab_size=17,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=16,
        intermediate_dim=24,
        max_seq_len=8,
    )
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["layers.0.attn.k_proj.weight"] == (8, 16)
    assert shapes["layers.0.mlp.w1.weight"] == (24, 16)
    assert shapes["tok_embeddings.weight"] == (17, 16)
    assert model.max_seq_len == 8 and len(model.layers) == 1

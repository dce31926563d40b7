"""The Qwen3 builders; equal logits with transformers stand in test_weights.py, generation in test_generate.py."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchtune.modules import TransformerDecoder

from tests.torchtune_grpo.tiny_models import dense_logits, make_model
from torchtune_grpo.models import qwen3_0_6b, qwen3_1_7b

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize(
    ("build", "width", "hidden", "published"),
    [(qwen3_0_6b, 1024, 3072, 596_049_920), (qwen3_1_7b, 2048, 6144, 1_720_574_976)],
)
def test_named_builders_have_the_published_sizes(
    build: Callable[[], TransformerDecoder], width: int, hidden: int, published: int
) -> None:
    with torch.device("meta"):
        model = build()
    assert sum(p.numel() for p in model.parameters()) == published
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["tok_embeddings.weight"] == (151_936, width)
    assert shapes["layers.27.attn.q_proj.weight"] == (16 * 128, width)
    assert shapes["layers.27.attn.k_proj.weight"] == shapes["layers.27.attn.v_proj.weight"] == (8 * 128, width)
    assert shapes["layers.27.attn.output_proj.weight"] == (width, 16 * 128)
    assert shapes["layers.27.attn.q_proj.norm.scale"] == shapes["layers.27.attn.k_proj.norm.scale"] == (128,)
    assert shapes["layers.27.mlp.w1.weight"] == (hidden, width)
    assert not any(name.endswith("bias") or name.startswith("output") for name in shapes)
    attention = model.layers[0].attn
    assert {m.eps for m in model.modules() if hasattr(m, "eps")} == {1e-6}
    assert attention.pos_embeddings.base == 1e6
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (16, 8, 128)
    assert model.max_seq_len == 32_768


@torch.no_grad()
def test_queries_and_keys_are_normalised_before_they_are_rotated() -> None:
    """torchtune's own place for the norms, after the rotary embedding, gives other logits."""
    model = make_model("qwen3")
    expected = dense_logits(model, IDS).float()
    torch.testing.assert_close(model(torch.tensor([IDS]))[0], expected, atol=1e-5, rtol=1e-5)
    for layer in model.layers:
        attention = layer.attn
        attention.q_norm, attention.k_norm = attention.q_proj.norm, attention.k_proj.norm
        attention.q_proj.norm = attention.k_proj.norm = nn.Identity()
    assert (model(torch.tensor([IDS]))[0] - expected).abs().max() > 0.05


@pytest.mark.parametrize("projection", ["q_proj", "k_proj"])
def test_each_head_is_normalised_by_itself(projection: str) -> None:
    model = make_model("qwen3")
    linear = getattr(model.layers[0].attn, projection)
    heads = linear(torch.randn(2, 5, 32)).unflatten(-1, (-1, 12)) / linear.norm.scale
    assert heads.shape[-2] == {"q_proj": 4, "k_proj": 2}[projection]
    torch.testing.assert_close(heads.square().mean(dim=-1), torch.ones(heads.shape[:-1]), atol=1e-2, rtol=0)


def test_layer_compiles_as_one_graph() -> None:
    model = make_model("qwen3")
    tokens = torch.tensor([IDS])
    expected = model(tokens)
    for layer in model.layers:
        layer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(model(tokens), expected)

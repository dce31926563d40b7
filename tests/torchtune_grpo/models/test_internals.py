"""Attention patterns; kernels and heads swapped for a block are tested by what uses them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.torchtune_grpo.tiny_models import KINDS, make_model
from torchtune_grpo.models.internals import AttentionPattern, forward_with_pattern

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])


class _Causal(AttentionPattern):
    """The model's own attention, written as a pattern; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        assert q.shape[1] == 4 and k.shape[1] == v.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("kind", KINDS)
def test_causal_pattern_equals_the_models_own_attention(kind: str) -> None:
    model, pattern = make_model(kind), _Causal()
    parameters = list(model.parameters())
    expected = model(IDS)
    actual = forward_with_pattern(model, IDS, torch.arange(7)[None], pattern)
    assert pattern.calls == len(model.layers)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        torch.autograd.grad(actual, parameters, upstream),
        torch.autograd.grad(expected, parameters, upstream),
        atol=1e-4,
        rtol=1e-4,
    )
    assert torch.equal(model(IDS), expected)
    assert pattern.calls == len(model.layers)


def test_pattern_forward_prepares_a_model_once() -> None:
    model = make_model("gqa")
    prepared = []
    for _ in range(2):
        forward_with_pattern(model, IDS, torch.arange(7)[None], _Causal())
        prepared.append([layer.attn._attention_call for layer in model.layers])
    assert all(one is other for one, other in zip(*prepared, strict=True))


def test_pattern_forward_restores_the_models_length_after_an_error() -> None:
    model = make_model("gqa", max_seq_len=4)
    with pytest.raises(IndexError):  # positions beyond the rotary table
        forward_with_pattern(model, IDS, torch.arange(7)[None], _Causal())
    assert model.max_seq_len == 4
    with pytest.raises(ValueError, match="max_seq_len"):
        model(IDS)


def test_patterns_run_in_compiled_layers_without_compiling_anew_for_each() -> None:
    plain, compiled = make_model("gqa"), make_model("gqa")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    for layer in compiled.layers:
        layer.compile(backend=backend)
    counts = []
    for length in (7, 6, 5, 4, 3):
        inputs = IDS[:, :length], torch.arange(length)[None]
        pattern = _Causal()
        torch.testing.assert_close(
            forward_with_pattern(compiled, *inputs, pattern), plain(inputs[0]), atol=1e-5, rtol=1e-5
        )
        assert pattern.calls == len(compiled.layers)
        counts.append(len(graphs))
    assert counts[0] > 0 and counts[-1] == counts[1]  # once as it stands, once with the length open

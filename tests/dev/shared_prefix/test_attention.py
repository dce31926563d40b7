"""All backends against the attention of each row by itself, written out in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from dev.shared_prefix.attention import (
    FlexBackend,
    SDPABackend,
    VarlenBackend,
    VarlenPattern,
    flash_kernel,
    gather_rows,
    visible,
)
from dev.shared_prefix.layout import CompactLayout, compact_layout
from tests.dev.shared_prefix.rollouts import SHAPES
from tests.dev.shared_prefix.test_layout import layouts
from torchtune_grpo.config import ConfigError
from torchtune_grpo.models.internals import AttentionPattern

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``q [a, HEADS, h]``, the last ``a`` tokens of ``k``, ``v [b, KV_HEADS, h]``, causal."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("ahd,bhd->hab", q, k) / math.sqrt(q.shape[-1])
    offset = k.shape[0] - q.shape[0]
    hidden = torch.tensor([[j > i + offset for j in range(k.shape[0])] for i in range(q.shape[0])])
    return torch.einsum("hab,bhd->ahd", scores.masked_fill(hidden, -math.inf).softmax(dim=-1), v)


def plain_kernel(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: object
) -> Tensor:
    """What ``varlen_attn`` promises."""
    assert options == {"window_size": (-1, 0), "enable_gqa": True}
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (cu_q.diff().max(), cu_k.diff().max()) == (max_q, max_k)
    return torch.cat(
        [
            _softmax_attention(q[a:b], k[c:d], v[c:d])
            for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)
        ]
    )


def _varlen(layout: CompactLayout) -> AttentionPattern:
    return VarlenPattern(layout, plain_kernel)


def _by_rows(layout: CompactLayout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each row whole, from the compact tokens it consists of; a prompt's outputs from the first row of its group."""
    out: dict[int, Tensor] = {}
    for start, end in zip(layout.cu_keys[:-1].tolist(), layout.cu_keys[1:].tolist(), strict=True):
        places = layout.keys[start:end]
        of_row = _softmax_attention(*(x[0].transpose(0, 1)[places] for x in (q, k, v)))
        for place, value in zip(places.tolist(), of_row, strict=True):
            out.setdefault(place, value)
    return torch.stack([out[place] for place in range(layout.num_tokens)], dim=1)[None]


def _inputs(layout: CompactLayout, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(layout.num_tokens)
    return [
        torch.randn(1, heads, layout.num_tokens, WIDTH, generator=generator, dtype=dtype).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def _assert_attends_by_rows(backend: Callable[[CompactLayout], AttentionPattern], layout: CompactLayout) -> None:
    inputs = _inputs(layout)
    expected, actual = _by_rows(layout, *inputs), backend(layout).attend(*inputs)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(actual, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        atol=1e-12,
        rtol=1e-12,
    )


@pytest.mark.parametrize("backend", [SDPABackend(), _varlen], ids=["sdpa", "varlen"])
@pytest.mark.parametrize("shape", SHAPES)
def test_backend_attends_as_each_row_by_itself(shape: str, backend: Callable[..., AttentionPattern]) -> None:
    _assert_attends_by_rows(backend, compact_layout(*SHAPES[shape]))


@settings(max_examples=25, deadline=None)
@given(layouts())
def test_backends_attend_as_each_row_by_itself_for_any_layout(shape: tuple[list[int], list[int], list[int]]) -> None:
    layout = compact_layout(*shape)
    _assert_attends_by_rows(SDPABackend(), layout)
    _assert_attends_by_rows(_varlen, layout)


@settings(max_examples=25, deadline=None)
@given(layouts())
def test_flex_sees_what_the_row_of_a_token_holds_before_it(shape: tuple[list[int], list[int], list[int]]) -> None:
    layout = compact_layout(*shape)
    places = torch.arange(layout.num_tokens)
    mask = visible(layout)(torch.tensor(0), torch.tensor(0), places[:, None], places)
    rows = [layout.keys[a:b].tolist() for a, b in zip(layout.cu_keys[:-1], layout.cu_keys[1:], strict=True)]
    seen = {(row[i], row[j]) for row in rows for i in range(len(row)) for j in range(i + 1)}
    assert {tuple(pair) for pair in mask.nonzero().tolist()} == seen


@pytest.mark.parametrize("shape", SHAPES)
def test_flex_attends_as_each_row_by_itself(shape: str) -> None:
    layout = compact_layout(*SHAPES[shape])
    inputs = [x.detach() for x in _inputs(layout, torch.float32)]
    actual, expected = FlexBackend()(layout).attend(*inputs), _by_rows(layout, *inputs)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_flex_backend_refuses_a_backward_on_cpu() -> None:
    layout = compact_layout([2, 2], [1, 3], [0, 0])
    with pytest.raises(ConfigError, match="logprobs.backend: got FlexBackend on cpu.*SDPABackend"):
        FlexBackend()(layout).attend(*_inputs(layout, torch.float32))


def test_varlen_backend_refuses_the_cpu() -> None:
    with pytest.raises(ConfigError, match="logprobs.backend: got VarlenBackend on cpu.*SDPABackend"):
        VarlenBackend()(compact_layout([2], [1], [0]))


def test_varlen_backend_refuses_fp32() -> None:
    layout = compact_layout([2], [1], [0])
    with pytest.raises(ConfigError, match="dtype: got torch.float32, expected bf16"):
        VarlenPattern(layout, flash_kernel).attend(*_inputs(layout, torch.float32))


def test_gather_rows_sums_gradients_of_a_repeated_row() -> None:
    source = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    out = gather_rows(source, torch.tensor([2, 0, 2]))
    assert out.tolist() == [[5, 6], [1, 2], [5, 6]]
    out.backward(torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]))
    assert source.grad.tolist() == [[2, 20], [0, 0], [4, 40]]


def test_gather_rows_sums_bf16_gradients_in_fp32() -> None:
    source = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.tensor([[256.0]] + [[1.0]] * 64, dtype=torch.bfloat16)
    gather_rows(source, torch.zeros(65, dtype=torch.int64)).backward(upstream)
    assert source.grad.dtype == torch.bfloat16
    assert source.grad.item() == 320.0  # in bf16 256 + 1 is 256

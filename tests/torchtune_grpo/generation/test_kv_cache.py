import pytest
import torch
from torch import Tensor

from torchtune_grpo.generation.kv_cache import GROWTH, DecodingLayout, LayerCache

HEAD_DIM = 6


def _attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query ``[h]`` over ``keys [s, h]``, in float64."""
    weights = (keys.double() @ q.double() / HEAD_DIM**0.5).softmax(dim=0)
    return weights @ values.double()


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_layer_cache_attends_to_own_prompt_and_own_response(kv_heads: int) -> None:
    """Two prompts of 3 and 1 tokens, two rows each; rows 1, then 0, end; 4 query heads."""
    prompt_lengths, steps = torch.tensor([3, 1]), GROWTH + 3
    prompt_k, prompt_v = (_random(2, kv_heads, 3, HEAD_DIM, seed=s) for s in (1, 2))
    cache = LayerCache(steps)
    cache.update(prompt_k, prompt_v)
    layout = DecodingLayout.full(torch.arange(3) < prompt_lengths[:, None], 2)
    cache.layout = layout
    rows, seen_k, seen_v = [0, 1, 2, 3], [[] for _ in range(4)], [[] for _ in range(4)]
    for step in range(steps):
        for ended in {4: [1], GROWTH + 1: [0]}.get(step, []):
            kept = [i for i, row in enumerate(rows) if row != ended]
            layout.keep(torch.tensor(kept))
            cache.keep(torch.tensor(kept))
            rows = [rows[i] for i in kept]
        q, k, v = (_random(4, heads, 1, HEAD_DIM, seed=10 * step + heads) for heads in (4, kv_heads, kv_heads))
        for row in rows:
            seen_k[row].append(k[row, :, 0])
            seen_v[row].append(v[row, :, 0])
        returned = cache.update(k[rows], v[rows])
        assert torch.equal(returned[0], k[rows]) and torch.equal(returned[1], v[rows])
        out = cache.attend(q[rows], *returned)
        for i, row in enumerate(rows):
            length = prompt_lengths[row // 2]
            for head in range(4):
                kv = head * kv_heads // 4
                keys = torch.cat([prompt_k[row // 2, kv, :length], torch.stack(seen_k[row])[:, kv]])
                values = torch.cat([prompt_v[row // 2, kv, :length], torch.stack(seen_v[row])[:, kv]])
                expected = _attention(q[row, head, 0], keys, values)
                torch.testing.assert_close(out[i, head, 0].double(), expected, atol=1e-5, rtol=0)
    assert rows == [2, 3]


def test_layer_cache_prefill_is_causal() -> None:
    q, k, v = (_random(1, heads, 4, HEAD_DIM, seed=heads) for heads in (4, 2, 2))
    cache = LayerCache(8)
    cache.update(k, v)
    out = cache.attend(q, k, v)
    for head in range(4):
        for place in range(4):
            expected = _attention(q[0, head, place], k[0, head // 2, : place + 1], v[0, head // 2, : place + 1])
            torch.testing.assert_close(out[0, head, place].double(), expected, atol=1e-6, rtol=0)


def test_layer_cache_keeps_its_own_copies_of_response_keys() -> None:
    cache = LayerCache(4)
    cache.update(torch.ones(1, 1, 2, HEAD_DIM), torch.ones(1, 1, 2, HEAD_DIM))
    cache.layout = DecodingLayout.full(torch.ones(1, 2, dtype=torch.bool), 1)
    k, v = _random(1, 1, 1, HEAD_DIM, seed=0), _random(1, 1, 1, HEAD_DIM, seed=1)
    kept = k.clone()
    cache.update(k, v)
    k.zero_()
    assert torch.equal(cache.k[:, :, :1], kept)


def test_layout_groups_rows_by_prompt() -> None:
    layout = DecodingLayout.full(torch.ones(3, 2, dtype=torch.bool), 2)
    assert layout.prompt_of_row.tolist() == [0, 0, 1, 1, 2, 2] and layout.is_rectangle
    rows = torch.arange(1.0, 7.0)
    assert layout.by_prompt(rows).tolist() == [[1, 2], [3, 4], [5, 6]]
    layout.keep(torch.tensor([1, 4, 5]))
    assert layout.prompt_of_row.tolist() == [0, 2, 2]
    assert layout.width == 2 and not layout.is_rectangle
    rows = torch.tensor([2.0, 5.0, 6.0])
    assert layout.by_prompt(rows).tolist() == [[2, 0], [0, 0], [5, 6]]
    assert layout.by_row(layout.by_prompt(rows)).tolist() == [2, 5, 6]
    layout.keep(torch.tensor([0, 2]))
    assert layout.prompt_of_row.tolist() == [0, 2] and layout.width == 1
    assert layout.by_prompt(torch.tensor([2.0, 6.0])).tolist() == [[2], [0], [6]]


def test_layout_is_a_rectangle_again_when_groups_are_equal() -> None:
    layout = DecodingLayout.full(torch.ones(2, 1, dtype=torch.bool), 3)
    layout.keep(torch.tensor([0, 2, 3, 4]))
    assert layout.is_rectangle and layout.width == 2
    assert layout.by_prompt(torch.tensor([1, 3, 4, 5])).tolist() == [[1, 3], [4, 5]]

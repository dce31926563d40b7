import pytest
import torch
from torch import Tensor

from torchtune_grpo.generation.kv_cache import DecodingLayout, LayerCache

HEAD_DIM = 6


def _attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query ``[h]`` over ``keys [s, h]``, in float64."""
    weights = (keys.double() @ q.double() / HEAD_DIM**0.5).softmax(dim=0)
    return weights @ values.double()


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_layer_cache_attends_to_own_prompt_and_own_response(kv_heads: int, fixed_shapes: bool) -> None:
    """Two prompts of 3 and 1 tokens, two rows each; rows 1, then 0, end, and the first prompt with them."""
    prompt_lengths, steps = torch.tensor([3, 1]), 9
    prompt_k, prompt_v = (_random(2, kv_heads, 3, HEAD_DIM, seed=s) for s in (1, 2))
    cache = LayerCache()
    cache.update(prompt_k, prompt_v)
    layout = DecodingLayout.full(torch.arange(3) < prompt_lengths[:, None], 2, fixed_shapes=fixed_shapes)
    cache.start_decoding(layout)
    rows, seen_k, seen_v = [0, 1, 2, 3], [[] for _ in range(4)], [[] for _ in range(4)]
    for step in range(steps):
        for ended in {3: [1], 6: [0]}.get(step, []):
            kept = [i for i, row in enumerate(rows) if row != ended]
            cache.keep(layout.keep(torch.tensor(kept)))
            rows = [rows[i] for i in kept]
        if step % 4 == 0:
            cache.reserve(step + 4)
        q, k, v = (_random(4, heads, 1, HEAD_DIM, seed=10 * step + heads) for heads in (4, kv_heads, kv_heads))
        for row in rows:
            seen_k[row].append(k[row, :, 0])
            seen_v[row].append(v[row, :, 0])
        returned = cache.update(k[rows], v[rows])
        assert all(part.shape == (len(rows), kv_heads, 0, HEAD_DIM) for part in returned)  # nothing to expand
        out = cache.attend(q[rows], *returned)
        layout.advance()
        for i, row in enumerate(rows):
            length = prompt_lengths[row // 2]
            for head in range(4):
                kv = head * kv_heads // 4
                keys = torch.cat([prompt_k[row // 2, kv, :length], torch.stack(seen_k[row])[:, kv]])
                values = torch.cat([prompt_v[row // 2, kv, :length], torch.stack(seen_v[row])[:, kv]])
                expected = _attention(q[row, head, 0], keys, values)
                torch.testing.assert_close(out[i, head, 0].double(), expected, atol=1e-5, rtol=0)
    assert rows == [2, 3]
    assert cache.prompt_k.shape[0] == 1 and cache.k.shape == (1, kv_heads, 2, 12, HEAD_DIM)
    assert cache.nbytes == 4 * 2 * kv_heads * HEAD_DIM * (3 + 2 * 12)


def test_layer_cache_prefill_is_causal() -> None:
    q, k, v = (_random(1, heads, 4, HEAD_DIM, seed=heads) for heads in (4, 2, 2))
    cache = LayerCache()
    cache.update(k, v)
    out = cache.attend(q, k, v)
    for head in range(4):
        for place in range(4):
            expected = _attention(q[0, head, place], k[0, head // 2, : place + 1], v[0, head // 2, : place + 1])
            torch.testing.assert_close(out[0, head, place].double(), expected, atol=1e-6, rtol=0)


def test_layer_cache_keeps_its_own_copies_of_response_keys() -> None:
    cache = LayerCache()
    cache.update(torch.ones(1, 1, 2, HEAD_DIM), torch.ones(1, 1, 2, HEAD_DIM))
    cache.start_decoding(DecodingLayout.full(torch.ones(1, 2, dtype=torch.bool), 1))
    cache.reserve(4)
    k, v = _random(1, 1, 1, HEAD_DIM, seed=0), _random(1, 1, 1, HEAD_DIM, seed=1)
    kept = k.clone()
    cache.update(k, v)
    k.zero_()
    assert torch.equal(cache.k[:, :, 0, :1], kept)


def _slots(layout: DecodingLayout) -> list[list[float]]:
    """Where the rows 1, 2, 3, ... stand, one list of slots a prompt."""
    rows = torch.arange(1.0, 1.0 + len(layout.slot_of_row))[:, None, None]
    rectangle = layout.by_prompt(rows)
    assert torch.equal(layout.by_row(rectangle), rows)
    return rectangle.squeeze(1).squeeze(-1).tolist()


def test_layout_keeps_rows_by_prompt() -> None:
    layout = DecodingLayout.full(torch.tensor([[True, True], [True, False], [True, True]]), 2)
    assert layout.prompt_of_row.tolist() == [0, 0, 1, 1, 2, 2]
    assert layout.is_rectangle and layout.is_padded
    assert _slots(layout) == [[1, 2], [3, 4], [5, 6]]
    kept = layout.keep(torch.tensor([1, 4, 5]))
    assert kept.prompts.tolist() == [0, 2] and kept.slots.tolist() == [[1, 1], [4, 5]]
    assert layout.prompt_of_row.tolist() == [0, 1, 1] and layout.prompt_mask.shape == (2, 2)
    assert layout.width == 2 and not layout.is_rectangle and not layout.is_padded
    assert _slots(layout) == [[1, 0], [2, 3]]
    kept = layout.keep(torch.tensor([0, 2]))
    assert kept.prompts.tolist() == [0, 1] and kept.slots.tolist() == [[0], [3]]
    assert layout.width == 1 and layout.is_rectangle
    assert _slots(layout) == [[1], [2]]


def test_layout_is_a_rectangle_again_when_groups_are_equal() -> None:
    layout = DecodingLayout.full(torch.ones(2, 1, dtype=torch.bool), 3)
    layout.keep(torch.tensor([0, 2, 3, 4]))
    assert layout.is_rectangle and layout.width == 2
    assert _slots(layout) == [[1, 2], [3, 4]]

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.shared_prefix.layout import CompactLayout, Group, compact_layout

# prompt | response: 10 11 12 | 21 22, 40 41 | 51 52 53, 10 11 12 | 31, 40 41 | 61 62
ROWS = [[10, 11, 12, 21, 22], [40, 41, 51, 52, 53], [10, 11, 12, 31], [40, 41, 61, 62]]
EXAMPLE = {
    "rows": [0, 2, 1, 3],
    "positions": [0, 1, 2, 3, 4, 3, 0, 1, 2, 3, 4, 2, 3],
    "weights": [2, 2, 2, 1, 1, 1, 2, 2, 1, 1, 1, 1, 1],
    "token_groups": [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1],
    "token_responses": [-1, -1, -1, 0, 0, 1, -1, -1, 2, 2, 2, 3, 3],
    "targets": [3, 4, 5, 8, 9, 10, 11, 12],
    "predictors": [2, 3, 2, 7, 8, 9, 7, 11],
    "cu_prompts": [0, 3, 5],
    "cu_responses": [0, 2, 3, 6, 8],
    "cu_keys": [0, 5, 9, 14, 18],
    "keys": [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8, 9, 10, 6, 7, 11, 12],
}


def _ids(layout: CompactLayout, rows: list[list[int]]) -> list[int]:
    return [rows[r][i] for r, i in zip(layout.token_rows.tolist(), layout.positions.tolist(), strict=True)]


def test_compact_layout_of_two_interleaved_groups() -> None:
    layout = compact_layout([3, 2, 3, 2], [2, 3, 1, 2], [7, 9, 7, 9])
    assert _ids(layout, ROWS) == [10, 11, 12, 21, 22, 31, 40, 41, 51, 52, 53, 61, 62]
    assert {name: getattr(layout, name).tolist() for name in EXAMPLE} == EXAMPLE
    assert layout.groups == (Group(prompt=3, responses=(2, 1)), Group(prompt=2, responses=(3, 2)))
    assert layout.num_tokens == 13
    assert layout.longest_row == 5
    assert int(layout.weights.sum()) == sum(map(len, ROWS)) == 18


def test_compact_layout_offsets_are_int32_and_indices_int64() -> None:
    layout = compact_layout([3, 2], [2, 3], [0, 1])
    kinds = {name: value.dtype for name, value in vars(layout).items() if isinstance(value, torch.Tensor)}
    offsets = {"cu_prompts", "cu_responses", "cu_keys"}
    assert all(dtype == (torch.int32 if name in offsets else torch.int64) for name, dtype in kinds.items())


def test_layout_moves_whole() -> None:
    moved = compact_layout([3, 2], [2, 3], [0, 1]).on(torch.device("meta"))
    assert all(value.is_meta for value in vars(moved).values() if isinstance(value, torch.Tensor))
    assert moved.groups == (Group(prompt=3, responses=(2,)), Group(prompt=2, responses=(3,)))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    groups = draw(st.lists(st.integers(0, 4), min_size=1, max_size=9))
    prompts = draw(st.lists(st.integers(1, 6), min_size=5, max_size=5))
    responses = draw(st.lists(st.integers(1, 5), min_size=len(groups), max_size=len(groups)))
    return [prompts[group] for group in groups], responses, groups


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_compact_layout_holds_every_row_once_and_every_prompt_once(
    shape: tuple[list[int], list[int], list[int]],
) -> None:
    prompts, responses, groups = shape
    layout = compact_layout(prompts, responses, groups)
    # A row's tokens as (group, place) in the prompt and (row, place) in the response: what may be shared is equal.
    rows = [
        [("prompt", groups[r], i) if i < prompts[r] else ("response", r, i) for i in range(prompts[r] + responses[r])]
        for r in range(len(groups))
    ]
    ids = _ids(layout, rows)
    assert len(set(ids)) == len(ids)
    assert set(ids) == {token for row in rows for token in row}
    counts = [sum(token in row for row in rows) for token in ids]
    assert layout.weights.tolist() == counts
    assert sum(counts) == sum(map(len, rows))
    # In compact order of the rows: each response token, and the token before it in its row.
    expected = [
        (row[i], row[i - 1]) for r in layout.rows.tolist() for row in [rows[r]] for i in range(prompts[r], len(row))
    ]
    found = zip(layout.targets.tolist(), layout.predictors.tolist(), strict=True)
    assert [(ids[target], ids[predictor]) for target, predictor in found] == expected
    assert [ids[key] for key in layout.keys.tolist()] == [token for r in layout.rows.tolist() for token in rows[r]]

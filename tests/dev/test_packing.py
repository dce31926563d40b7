from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.packing import first_fit_decreasing, pack_groups, pack_rows, plan_groups, plan_rows
from tests.torchtune_grpo.builders import make_rollout
from torchtune_grpo.config import ConfigError


def _cost(rows: list[int], prompts: list[int], responses: list[int], groups: list[int]) -> int:
    """Prompts once a group, and all responses."""
    prompt_of = {groups[row]: prompts[row] for row in rows}
    return sum(prompt_of.values()) + sum(responses[row] for row in rows)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    """Prompt and response lengths and groups of up to 5 groups, and a capacity that the longest row fits."""
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=9)), max_size=5)
    )
    prompts = [prompt for prompt, lengths in shapes for _ in lengths]
    responses = [length for _, lengths in shapes for length in lengths]
    groups = [10 - number for number, (_, lengths) in enumerate(shapes) for _ in lengths]
    longest = max((p + r for p, r in zip(prompts, responses, strict=True)), default=1)
    return prompts, responses, groups, longest + draw(st.integers(0, 60))


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_pack_groups_properties(layout: tuple[list[int], list[int], list[int], int]) -> None:
    prompts, responses, groups, capacity = layout
    bins = pack_groups(prompts, responses, groups, capacity)
    assert sorted(row for rows in bins for row in rows) == list(range(len(prompts)))
    assert all(rows == sorted(rows) for rows in bins)
    assert all(_cost(rows, prompts, responses, groups) <= capacity for rows in bins)
    for group in set(groups):
        parts = [[row for row in rows if groups[row] == group] for rows in bins]
        costs = [_cost(part, prompts, responses, groups) for part in parts if part]
        prompt = prompts[groups.index(group)]
        # No two fragments of a group would fit one bin, so a group that fits one is not cut.
        assert all(one + other - prompt > capacity for one, other in pairwise(sorted(costs)))


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_pack_rows_properties(layout: tuple[list[int], list[int], list[int], int]) -> None:
    prompts, responses, _, capacity = layout
    bins = pack_rows(prompts, responses, capacity)
    costs = [sum(prompts[row] + responses[row] for row in rows) for rows in bins]
    assert sorted(row for rows in bins for row in rows) == list(range(len(prompts)))
    assert all(rows == sorted(rows) for rows in bins)
    assert all(cost <= capacity for cost in costs)
    assert all(one + other > capacity for one, other in pairwise(sorted(costs)))


def test_first_fit_decreasing_fills_the_first_bin_with_room() -> None:
    # 6 | 5 | 4 joins 6 | 3 joins 5 | 2 joins 5 (5 + 3 + 2 = 10)
    assert first_fit_decreasing([3, 6, 2, 5, 4], 10) == [[1, 4], [0, 2, 3]]
    assert first_fit_decreasing([5, 5, 5], 10) == [[0, 1], [2]]
    assert first_fit_decreasing([], 10) == []


def test_pack_groups_pays_a_prompt_once_a_bin() -> None:
    # 4 + 3 + 3 = 10: one copy of the prompt fits, two would need 14.
    assert pack_groups([4, 4], [3, 3], [7, 7], 10) == [[0, 1]]
    assert pack_rows([4, 4], [3, 3], 10) == [[0], [1]]


def test_pack_groups_cuts_a_group_only_where_it_must_and_never_to_fill_a_gap() -> None:
    prompts, responses, groups = [2, 2, 2, 5, 5], [6, 6, 5, 3, 2], [0, 0, 0, 1, 1]
    # Group 0: 2 + 6 + 5 > 12, so fragments [6], [6], [5]... of capacity 12 - 2 = 10: each row alone. Group 1: 10.
    assert pack_groups(prompts, responses, groups, 12) == [[3, 4], [0], [1], [2]]
    # Of capacity 15 - 2 = 13: 6 + 6 together, then 5. The 5 left over beside group 1 cannot hold 2 + 5.
    assert pack_groups(prompts, responses, groups, 15) == [[0, 1], [3, 4], [2]]
    # Of capacity 19: the whole of group 0 at 2 + 17. Cutting it would have spared nothing.
    assert pack_groups(prompts, responses, groups, 19) == [[0, 1, 2], [3, 4]]


def test_pack_groups_mixes_groups_and_keeps_siblings_together() -> None:
    # Costs 4 + 2 = 6, 3 + 4 = 7, 1 + 3 = 4: 7 | 6 + 4.
    assert pack_groups([4, 4, 3, 3, 1], [1, 1, 2, 2, 3], [5, 5, 9, 9, 2], 10) == [[2, 3], [0, 1, 4]]


@pytest.mark.parametrize("pack", [pack_rows, lambda p, r, c: pack_groups(p, r, [0, 1], c)])
def test_packers_refuse_a_row_longer_than_a_bin_by_name(pack) -> None:
    assert sum(len(rows) for rows in pack([3, 6], [4, 5], 11)) == 2
    with pytest.raises(
        ConfigError, match=r"max_tokens_per_micro_batch: got 10, expected at least 11: row 1 .* 6 .* 5 tokens"
    ):
        pack([3, 6], [4, 5], 10)


def test_plans_read_lengths_and_groups_of_a_rollout() -> None:
    rollout = make_rollout([3, 3, 2, 5], prompt_lengths=[4, 4, 2, 2], group_size=2, extra=3)
    assert [rows.tolist() for rows in plan_groups(rollout, 10)] == [[0, 1], [2, 3]]
    assert [rows.tolist() for rows in plan_rows(rollout, 11)] == [[0, 2], [1], [3]]
    assert all(rows.dtype == torch.int64 for rows in plan_rows(rollout, 11) + plan_groups(rollout, 10))

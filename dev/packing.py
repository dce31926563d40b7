"""Which rows share a micro-batch when nothing is padded: first-fit decreasing, with and without shared prompts.

Costs are real lengths in tokens. Bins come out with the largest items first, so that memory peaks at the start, and
their rows in ascending order, so that siblings, neighbours in a rollout, stay neighbours. Deterministic and local to a
rank; ``split_in_step`` and ``plan_in_step`` then give every rank the same number of bins.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtune_grpo.config import ConfigError
from torchtune_grpo.types import Rollout


def plan_rows(rollout: Rollout, max_tokens: int) -> list[Tensor]:
    """Row indices, int64 on CPU, of micro-batches of whole rows, prompts included; see ``pack_rows``."""
    prompts, responses = rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist()
    return [torch.tensor(rows) for rows in pack_rows(prompts, responses, max_tokens)]


def plan_groups(rollout: Rollout, max_tokens: int) -> list[Tensor]:
    """Row indices, int64 on CPU, of micro-batches that hold each prompt once; see ``pack_groups``."""
    prompts, responses = rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist()
    return [torch.tensor(rows) for rows in pack_groups(prompts, responses, rollout.groups.tolist(), max_tokens)]


def pack_rows(prompt_lengths: Sequence[int], response_lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of rows, each row at the cost of its prompt and its response.

    Raises:
        ConfigError: a row that costs more than ``capacity``.
    """
    _check_rows(prompt_lengths, response_lengths, capacity)
    costs = [p + r for p, r in zip(prompt_lengths, response_lengths, strict=True)]
    return first_fit_decreasing(costs, capacity)


def pack_groups(
    prompt_lengths: Sequence[int], response_lengths: Sequence[int], groups: Sequence[int], capacity: int
) -> list[list[int]]:
    """Bins of rows, where the rows that a bin holds of a group (a fragment) cost their prompt once.

    A group that fits a bin is one fragment; another is cut by first-fit into fragments of ``capacity`` with the prompt.
    Fragments are then packed uncut: a gap that is left beside some other group never forces a further copy of a prompt,
    and a group that spans bins pays its prompt in each. ``groups`` numbers the rows' groups; all rows of one have the
    same prompt.

    Raises:
        ConfigError: a row that costs more than ``capacity``.
    """
    _check_rows(prompt_lengths, response_lengths, capacity)
    fragments = [
        [rows[i] for i in part]
        for rows in _members(groups)
        for part in first_fit_decreasing([response_lengths[row] for row in rows], capacity - prompt_lengths[rows[0]])
    ]
    costs = [prompt_lengths[part[0]] + sum(response_lengths[row] for row in part) for part in fragments]
    bins = first_fit_decreasing(costs, capacity)
    return [sorted(row for i in members for row in fragments[i]) for members in bins]


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Items, largest first, equals in order, each into the first bin that has room; returns the items of each bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fit = next((i for i, left in enumerate(room) if sizes[item] <= left), len(bins))
        if fit == len(bins):
            bins.append([])
            room.append(capacity)
        bins[fit].append(item)
        room[fit] -= sizes[item]
    return [sorted(members) for members in bins]


def _members(groups: Sequence[int]) -> list[list[int]]:
    """The rows of each group, groups in first-seen order."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    return list(members.values())


def _check_rows(prompt_lengths: Sequence[int], response_lengths: Sequence[int], capacity: int) -> None:
    for row, (prompt, response) in enumerate(zip(prompt_lengths, response_lengths, strict=True)):
        if prompt + response > capacity:
            raise ConfigError(
                f"max_tokens_per_micro_batch: got {capacity}, expected at least {prompt + response}: row {row} has a "
                f"prompt of {prompt} and a response of {response} tokens"
            )

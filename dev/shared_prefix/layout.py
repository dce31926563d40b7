"""Where the tokens of several groups stand when each prompt is written once: index arithmetic, nothing else.

The compact order is ``[1, T]``: group by group in first-seen order, the prompt once, then every response of the group.
Positions restart at the prompt's length for each response. The last prompt token predicts the first token of every
response, so its place appears once per response among the predictors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Group:
    """Lengths in tokens: of the shared prompt, and of each response in compact order."""

    prompt: int
    responses: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CompactLayout:
    """N rows of K groups as T compact tokens, E of which are response tokens. All tensors are int64 or int32 indices.

    Per row, in compact order: ``rows [N]``, the number that the caller gave the row.
    Per compact token: ``token_rows [T]``, a row that holds it; ``positions [T]``, its place in that row's prompt +
    response, which is also its rotary position; ``weights [T]``, the logical weight: for how many rows it stands (the
    sum is the number of dense tokens; statistics over tokens, such as a router's load, count by it);
    ``token_groups [T]``, its group 0..K-1; ``token_responses [T]``, its response 0..N-1 in compact order, or -1 in a
    prompt.
    Per response token: ``targets [E]``, its compact place; ``predictors [E]``, the place that predicts it.
    For variable-length attention, int32: ``cu_prompts [K+1]``, ``cu_responses [N+1]`` and ``cu_keys [N+1]``, where the
    keys of a response are its prompt and itself; ``keys [cu_keys[-1]]`` are their compact places.
    """

    groups: tuple[Group, ...]
    rows: Tensor
    token_rows: Tensor
    positions: Tensor
    weights: Tensor
    token_groups: Tensor
    token_responses: Tensor
    targets: Tensor
    predictors: Tensor
    cu_prompts: Tensor
    cu_responses: Tensor
    cu_keys: Tensor
    keys: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.positions.shape[0]

    @property
    def longest_row(self) -> int:
        """Prompt and response of the longest row, in tokens."""
        return max(group.prompt + max(group.responses) for group in self.groups)

    def on(self, device: torch.device) -> "CompactLayout":
        """The same with every tensor on ``device``."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "groups"}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


def compact_layout(
    prompt_lengths: Sequence[int], response_lengths: Sequence[int], groups: Sequence[int]
) -> CompactLayout:
    """The layout of rows with these lengths (each at least 1), on CPU.

    ``groups`` names each row's group by any number; rows of a group need not stand next to each other, and must share
    their prompt. Groups and rows keep their first-seen order.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    shapes = tuple(
        Group(prompt=prompt_lengths[rows[0]], responses=tuple(response_lengths[row] for row in rows))
        for rows in members.values()
    )
    rows = torch.tensor([row for group in members.values() for row in group])
    group_of_row = torch.tensor([i for i, shape in enumerate(shapes) for _ in shape.responses])
    prompts = torch.tensor([shape.prompt for shape in shapes])
    responses = torch.tensor([length for shape in shapes for length in shape.responses])
    siblings = torch.tensor([len(shape.responses) for shape in shapes])

    # Segments: each group's prompt, then its responses. Number of a row's segment: rows and prompts before it.
    row_segment = torch.arange(len(rows)) + group_of_row + 1
    prompt_segment = siblings.cumsum(0) - siblings + torch.arange(len(shapes))
    row_prompts = prompts[group_of_row]

    def by_segment(of_prompts: Tensor, of_rows: Tensor) -> Tensor:
        values = torch.empty(len(shapes) + len(rows), dtype=torch.int64)
        values[prompt_segment], values[row_segment] = of_prompts, of_rows
        return values

    lengths = by_segment(prompts, responses)
    starts = lengths.cumsum(0) - lengths
    prompt_starts, row_starts = starts[prompt_segment], starts[row_segment]

    def by_token(of_prompts: Tensor, of_rows: Tensor) -> Tensor:
        return by_segment(of_prompts, of_rows).repeat_interleave(lengths)

    last_of_prompt = (prompt_starts + prompts - 1)[group_of_row].repeat_interleave(responses)
    targets = _ranges(row_starts, responses)
    is_first = targets == row_starts.repeat_interleave(responses)
    return CompactLayout(
        groups=shapes,
        rows=rows,
        token_rows=by_token(rows[siblings.cumsum(0) - siblings], rows),
        positions=_ranges(by_segment(torch.zeros_like(prompts), row_prompts), lengths),
        weights=by_token(siblings, torch.ones_like(rows)),
        token_groups=by_token(torch.arange(len(shapes)), group_of_row),
        token_responses=by_token(torch.full_like(prompts, -1), torch.arange(len(rows))),
        targets=targets,
        predictors=torch.where(is_first, last_of_prompt, targets - 1),
        cu_prompts=_offsets(prompts),
        cu_responses=_offsets(responses),
        cu_keys=_offsets(row_prompts + responses),
        keys=_ranges(
            torch.stack([prompt_starts[group_of_row], row_starts], dim=1).flatten(),
            torch.stack([row_prompts, responses], dim=1).flatten(),
        ),
    )


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """``start, start + 1, ...`` of every range, one after the other."""
    offsets = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - offsets).repeat_interleave(lengths)


def _offsets(lengths: Tensor) -> Tensor:
    """0 and the running sums, int32 as the kernels want them."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()

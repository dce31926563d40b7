"""A rollout with updates left, as a checkpoint holds it: taken up by any number of ranks.

Each rank saves its own rows. Mini-batch k of a rollout is that of all ranks together, so when another number of ranks
resumes, the rows of each mini-batch are dealt out anew, in the order of the ranks that saved them, and every update is
on the rows that it would have been on. The gradients are then equal to rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtune_grpo.dynamic_sampling import concat_rollouts
from torchtune_grpo.training.checkpoints import Resumed
from torchtune_grpo.training.distributed import Ranks
from torchtune_grpo.types import Rollout, Trajectory

T = TypeVar("T", bound=Trajectory)


def rollout_state(trajectory: Trajectory, samples: Sequence[Any]) -> dict[str, Any]:
    """This rank's trajectory and its rows of the table of samples, as tensors and plain values."""
    values = {**_fields(trajectory), "rollout": _fields(trajectory.rollout)}
    return {"trajectory": values, "samples": samples}


def resume_rollout(
    kind: type[T], resumed: Resumed, ranks: Ranks, *, minibatches: int, pad_id: int
) -> tuple[T, list[Any]] | None:
    """This rank's trajectory, a ``kind``, and its samples; None where the checkpoint fell between two rollouts.

    ``minibatches``: those of an epoch. Local.
    """
    saved = [local["rollout"] for local in resumed.local]
    if saved[0] is None:
        return None
    parts = [_build(kind, rollout["trajectory"]) for rollout in saved]
    whole = parts[0] if resumed.same_ranks else _dealt(_concat(parts, pad_id), len(parts), minibatches, ranks)
    return whole.to(ranks.device), saved[0]["samples"]


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _build(kind: type[T], values: Mapping[str, Any]) -> T:
    return kind(**{**values, "rollout": Rollout(**values["rollout"])})


def _dealt(trajectory: T, saved_by: int, minibatches: int, ranks: Ranks) -> T:
    """The rows of this rank, out of those of ``saved_by`` ranks in rank order."""
    by_minibatch = torch.arange(len(trajectory)).view(saved_by, minibatches, -1).transpose(0, 1)
    return trajectory.rows(by_minibatch.reshape(minibatches, ranks.world_size, -1)[:, ranks.rank].flatten())


def _concat(parts: Sequence[T], pad_id: int) -> T:
    """The rows of all, in order, padded to the widest completion."""
    rollout = concat_rollouts([part.rollout for part in parts], pad_id)
    width = rollout.response_mask.shape[1]
    columns = {name: [getattr(part, name) for part in parts] for name in _fields(parts[0]) if name != "rollout"}
    return type(parts[0])(rollout=rollout, **{name: _joined(values, width) for name, values in columns.items()})


def _joined(values: Sequence[Any], width: int) -> Any:
    """One field of all parts: ``[N, R]`` and ``[N]`` tensors, a sequence of one item a row, or None."""
    if values[0] is None:
        return None
    if not isinstance(values[0], Tensor):
        return [item for part in values for item in part]
    return torch.cat([pad(part, (0, width - part.shape[1])) if part.dim() == 2 else part for part in values])

"""Numbers over a trajectory's trained tokens: whole, and by teacher and data source."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchtune_grpo.distillation.payloads import DistillationTrajectory
from torchtune_grpo.distillation.routing import rows_by_teacher
from torchtune_grpo.types import Metrics, masked_sum


def means(name: str, values: Tensor, trajectory: DistillationTrajectory, teachers: Sequence[str]) -> Metrics:
    """``name``, ``teacher/<teacher>/<name>`` and ``source/<source>/<name>``: (sum, count) of ``values [N, R]``."""
    trained = _trained(trajectory)
    return {
        f"{prefix}{name}": (masked_sum(values[rows].detach().float(), trained[rows]), trained[rows].sum().float())
        for prefix, rows in _groups(trajectory, teachers).items()
    }


def minima(
    name: str, values: Tensor, trajectory: DistillationTrajectory, teachers: Sequence[str]
) -> Mapping[str, Tensor]:
    """The least of ``values [N, R]`` under the names of ``means``; inf where no token is trained."""
    masked = values.detach().float().masked_fill(~_trained(trajectory), torch.inf)
    return {f"{prefix}{name}": masked[rows].amin() for prefix, rows in _groups(trajectory, teachers).items()}


def _trained(trajectory: DistillationTrajectory) -> Tensor:
    return trajectory.rollout.response_mask & (trajectory.token_weights > 0)


def _groups(trajectory: DistillationTrajectory, teachers: Sequence[str]) -> dict[str, Tensor]:
    """Prefix of a metric's name -> the rows it is taken over, never none."""
    source, device = trajectory.rollout.source, trajectory.token_weights.device
    by_teacher = rows_by_teacher(trajectory.teacher_index, len(trajectory), len(teachers))
    groups = {"": torch.arange(len(trajectory))}
    groups |= {f"teacher/{name}/": rows for name, rows in zip(teachers, by_teacher, strict=True) if len(rows)}
    for name in sorted(set(source)):
        groups[f"source/{name}/"] = torch.tensor([row for row, own in enumerate(source) if own == name])
    return {prefix: rows.to(device) for prefix, rows in groups.items()}

"""LM heads split by vocabulary over a few ranks, whose transformer bodies stay data parallel.

Ranks of a head group hold different rows. At the head each gathers the hidden states of all of them and projects these
onto its own slice of the vocabulary; the divergence reduces over the group, and each rank goes on with its own rows.
Each rank's rows get the gradient of all slices, and a slice of a head's weight that of the tokens of the whole group:
what FSDP averages over all ranks is the gradient of heads in one piece, with unchanged token weights.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from torchtune_grpo.config import ConfigError
from torchtune_grpo.training.distributed import Ranks


@dataclass(frozen=True, kw_only=True)
class HeadGroup:
    """The slice ``start:stop`` of the vocabulary that this rank projects onto, and the ranks that hold the others.

    ``group`` None: no other rank, the slice is the whole vocabulary, and no method makes a collective.
    """

    start: int
    stop: int
    group: dist.ProcessGroup | None

    def counts(self, count: int, device: torch.device) -> list[int]:
        """``count`` of every rank of the group, in rank order. Collective: one all-gather over the group."""
        if self.group is None:
            return [count]
        counts = torch.zeros(dist.get_world_size(self.group), dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(counts, torch.tensor([count], device=device), group=self.group)
        return counts.tolist()

    def gather(self, rows: Tensor, counts: list[int], *, reduce_gradient: bool = False) -> Tensor:
        """``rows [n, ...]`` of every rank, ``[sum of counts, ...]``; differentiable.

        ``reduce_gradient``: each rank differentiates its slice of the vocabulary alone, so the gradient of what was
        gathered is summed over the group; otherwise it is complete already. Collectives: one all-gather, and one
        all-reduce backward if ``reduce_gradient``.
        """
        return rows if self.group is None else _GatherRows.apply(rows, counts, self.group, reduce_gradient)

    def own(self, values: Tensor, counts: list[int]) -> Tensor:
        """This rank's part of ``values [sum of counts, ...]``. No collective."""
        return values if self.group is None else _slice(values, counts, self.group)


def make_head_group(ranks: Ranks, tensor_parallel: int, vocab_size: int) -> HeadGroup:
    """Groups of ``tensor_parallel`` neighbouring ranks, each with an almost equal slice of ``vocab_size``.

    Collective: the making of the groups. Raises ConfigError unless the ranks divide.
    """
    if tensor_parallel < 1 or ranks.world_size % tensor_parallel:
        raise ConfigError(
            f"tensor_parallel: got {tensor_parallel}, expected a divisor of the number of ranks ({ranks.world_size})"
        )
    if tensor_parallel == 1:
        return HeadGroup(start=0, stop=vocab_size, group=None)
    shape = (ranks.world_size // tensor_parallel, tensor_parallel)
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("data", "vocabulary"))
    place = mesh.get_local_rank("vocabulary")
    bounds = [vocab_size * i // tensor_parallel for i in range(tensor_parallel + 1)]
    return HeadGroup(start=bounds[place], stop=bounds[place + 1], group=mesh.get_group("vocabulary"))


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, counts: list[int], group: dist.ProcessGroup, reduce_gradient: bool) -> Tensor:
        ctx.counts, ctx.group, ctx.reduce_gradient = counts, group, reduce_gradient
        widest = max(counts)
        padded = rows.new_zeros(widest, *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = rows.new_empty(len(counts) * widest, *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(gathered.split(widest), counts, strict=True)])

    @staticmethod
    def backward(ctx, gradient: Tensor):
        if ctx.reduce_gradient:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(gradient, group=ctx.group)
        return _slice(gradient, ctx.counts, ctx.group), None, None, None


def _slice(values: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    start = sum(counts[: dist.get_rank(group)])
    return values[start : start + counts[dist.get_rank(group)]]

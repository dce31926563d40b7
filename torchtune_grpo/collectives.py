"""Numbers, Python objects and errors across ranks, on the default process group; alone without one.

CPU tensors and objects go over gloo, which ``init_ranks`` sets up beside NCCL.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from torchtune_grpo.failures import RunError


class RankError(RunError):
    """Something failed on some rank; raised on every rank, with the message of each that failed."""

    names_ranks = True


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduces ``tensor`` over all ranks in place and returns it. Collective: one all-reduce; counts are kept on CPU."""
    if dist.is_initialized():
        dist.all_reduce(tensor, op)
    return tensor


def any_rank(flag: bool) -> bool:
    """True on every rank if ``flag`` is on any. Collective: one all-reduce of a CPU scalar."""
    return bool(all_reduce(torch.tensor(int(flag)), dist.ReduceOp.MAX))


def all_gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """``value`` of every rank, in rank order. Collective: one all-gather of pickled objects, over ``group`` or, for
    None, the default group."""
    if not dist.is_initialized():
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def shared_errors(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """An exception in the block on any rank becomes a RankError on every rank.

    Inside the block, a rank must not fail while others wait for it in a collective. Collective: one
    all-gather of messages when the block ends, as ``all_gather_objects``.
    """
    failure = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch DCP's own is no Exception
        failure = error
    message = None
    if failure is not None:
        kind = "" if isinstance(failure, RunError) else f"{type(failure).__name__}: "
        message = f"rank {rank()}: {kind}{failure}"
    messages = [text for text in all_gather_objects(message, group) if text is not None]
    if messages:
        raise RankError(f"{what}: " + "; ".join(messages)) from failure

"""The one reduction that the step's arithmetic needs, with or without a process group."""

import torch.distributed as dist
from torch import Tensor


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduces ``tensor`` over all ranks in place and returns it; without a process group, as it is.

    Collectives: one all_reduce on the default group, which must serve the tensor's device.
    """
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(tensor, op)
    return tensor

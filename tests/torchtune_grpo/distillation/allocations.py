"""What PyTorch operations allocate inside a ``with`` block."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """``largest``: bytes of the largest storage made inside the block; ``peak``: most bytes of such storages alive.

    Counted after each operation; what exists before the block, and scratch memory inside an operation, is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        before = {StorageWeakRef(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        self._alive = {storage: size for storage, size in self._alive.items() if not storage.expired()}
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            storage, size = StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
            if storage not in before:
                self._alive[storage] = size
                self.largest = max(self.largest, size)
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


def allocations(call: Callable[[], Any]) -> Allocations:
    """Of ``call()``."""
    with torch.random.fork_rng(devices=[]), Allocations() as seen:
        call()
    return seen

"""Runs a test's function on several gloo ranks of this machine."""

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A spawned process inherits sys.path and looks up the test's module by name from the checkout's root, which
# pytest's importlib mode leaves out.
_ROOT = str(Path(__file__).parents[2])
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)


class RankError(Exception):
    """An exception of one rank, as text."""


def run_ranks(fn: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 60) -> list[Any]:
    """Calls ``fn(rank, *args)`` in ``world_size`` processes of one gloo group; returns each rank's result.

    ``fn`` stands at the top level of a test module; arguments are pickled, results go through ``torch.save``.

    Raises:
        RankError: a rank raised; the message is the traceback of the first that did (its peers fail later).
        torch.multiprocessing.ProcessExitedException: a rank left without a result, as by ``os._exit(1)``.
        TimeoutError: not all ranks returned within ``timeout`` seconds; they are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawned = mp.spawn(_rank_main, (fn, args, world_size, timeout, folder), world_size, join=False)
        deadline = time.monotonic() + timeout
        try:
            while not spawned.join(timeout=max(deadline - time.monotonic(), 0.01)):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{fn.__name__}: {world_size} ranks did not return within {timeout} s")
        finally:
            for process in spawned.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        outcomes = [torch.load(_outcome(folder, rank), weights_only=False) for rank in range(world_size)]
    errors = [error for _, error in outcomes if error is not None]
    if errors:
        raise RankError(min(errors)[1])
    return [result for result, _ in outcomes]


def _rank_main(
    rank: int, fn: Callable[..., Any], args: tuple[Any, ...], world_size: int, timeout: float, folder: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        torch.save((fn(rank, *args), None), _outcome(folder, rank))
    except Exception:
        torch.save((None, (time.monotonic(), f"rank {rank}: {traceback.format_exc()}")), _outcome(folder, rank))
    finally:
        dist.destroy_process_group()
    # A gloo thread may still be dropping the last collective's tensors; an interpreter that winds down aborts on it.
    os._exit(0)


def _outcome(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.pt"

"""Peak memory of a call: bytes that torch allocated on top of what was there before."""

import gc
import os
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes to stderr at every use

_PAGE_COUNTS = "/proc/self/clear_refs"


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """Most bytes alive at once during ``call``, less those alive before; what it returns counts.

    On CUDA the allocator's own statistics; on CPU the profiler's record of every allocation and release, those inside
    kernels included. Scratch space of the CPU's matrix library is not torch's and does not show.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = call()
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = call()
    del kept
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes, initial=0))


def peak_resident_bytes(call: Callable[[], Any]) -> int | None:
    """The same by the kernel's count of pages in use, to check ``peak_bytes`` on CPU; None where it cannot be had.

    Linux lets a process reset its own high-water mark. Pages that Python or the C library held free before count as
    there already, so that only calls much larger than those compare.
    """
    gc.collect()
    try:
        with open(_PAGE_COUNTS, "w") as file:
            file.write("5")
    except OSError:
        return None
    before = _status("VmRSS")
    kept = call()
    peak = _status("VmHWM")
    del kept
    return peak - before


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

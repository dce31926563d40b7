"""How long a step's phases took, and how much memory they needed."""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_GIB = 2**30


class PhaseTimer:
    """Wall-clock seconds of named phases: ``with timer("rollout"): ...``; on CUDA, of finished work.

    An exception in the block gets the phase as a note, for the message that ends the run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        except Exception as error:
            error.add_note(f"phase {phase}")
            raise
        finally:
            self._seconds[phase] += self._now() - start

    def pop(self) -> dict[str, float]:
        """``{"seconds/<phase>": seconds}`` since the last call, local to this rank."""
        seconds = {f"seconds/{phase}": value for phase, value in self._seconds.items()}
        self._seconds.clear()
        return seconds

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def peak_memory_gib(device: torch.device) -> float:
    """The most memory held so far, GiB: allocated by torch on a CUDA device, else resident in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / _GIB

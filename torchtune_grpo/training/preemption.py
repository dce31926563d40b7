"""Leaving in good order when a scheduler wants the machine back: finish the optimizer step, save, exit with 75."""

import os
import signal
import time
from functools import partial
from types import FrameType

from torchtune_grpo.collectives import any_rank, rank
from torchtune_grpo.training.progress import say

PREEMPTED = 75
"""Exit status of every rank of a run that was asked to leave and can be continued."""

SAME_SIGNAL_S = 5.0
"""A launcher may pass on what each rank got already: a SIGTERM within so many seconds of another is the same one."""


SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class Preemption:
    """Listens to SIGUSR1 and, once training has begun, to SIGTERM.

    While the run is being set up there is nothing to save: SIGUSR1 ends the process at once with ``PREEMPTED``, SIGTERM
    kills it (a launcher also sends it to what is left of a run that failed, which must not look like a preemption).
    Processes that this one forks, as a judge may, get the default handlers back.

    From ``defer`` on, either makes ``requested`` true; a SIGTERM ``SAME_SIGNAL_S`` after the first kills the process.
    """

    def __init__(self) -> None:
        self._asked = self._deferred = False
        self._terminated = float("inf")  # when the first SIGTERM came
        signal.signal(signal.SIGUSR1, self._ask)
        # Held back until the child has its own handlers: what came in between would be lost.
        hold, let = (partial(signal.pthread_sigmask, how, SIGNALS) for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK))
        os.register_at_fork(before=hold, after_in_parent=let, after_in_child=_default_handlers)

    def defer(self) -> None:
        """Training begins: from here on the loop decides where to stop."""
        self._deferred = True
        signal.signal(signal.SIGTERM, self._ask)

    def requested(self) -> bool:
        """Whether any rank has been asked to leave; the same on every rank. Collective: one all-reduce."""
        return any_rank(self._asked)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self._deferred:
            os._exit(PREEMPTED)
        self._asked = True
        if number == signal.SIGTERM:
            now = time.monotonic()
            if now - self._terminated >= SAME_SIGNAL_S:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
            self._terminated = min(self._terminated, now)


def _default_handlers() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def say_preempted(step: int) -> None:
    """Rank 0 says that all work up to ``step`` is safe. No collective."""
    if rank() == 0:
        kept = f"the checkpoint of step {step} is saved" if step else "before the first step"
        say(f"preempted: {kept}; the same command with resume=auto continues the run")

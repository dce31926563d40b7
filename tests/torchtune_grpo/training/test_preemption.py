"""What signals do to a process before and during training."""

import multiprocessing
import os
import signal
import time

import pytest

from tests.torchtune_grpo.distributed_helpers import run_ranks
from torchtune_grpo.training import preemption as preemption_module
from torchtune_grpo.training.preemption import PREEMPTED, Preemption


def _signal_to_one_rank(rank: int) -> list[bool]:
    preemption = Preemption()
    preemption.defer()
    seen = [preemption.requested()]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    return [*seen, preemption.requested(), preemption.requested()]


def test_signal_to_one_rank_is_known_to_all_and_stays() -> None:
    assert run_ranks(_signal_to_one_rank) == [[False, True, True]] * 2


def test_forked_process_can_be_terminated() -> None:
    """As a judge does that runs code in a process of its own."""
    child = os.fork()
    if child == 0:
        Preemption().defer()
        sandbox = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        sandbox.start()
        sandbox.terminate()
        sandbox.join(30)
        os._exit(int(sandbox.exitcode != -signal.SIGTERM))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("number", "deferred", "signals", "same_s", "status"),
    [
        (signal.SIGUSR1, False, 1, 5.0, PREEMPTED),
        (signal.SIGTERM, False, 1, 5.0, -signal.SIGTERM),
        (signal.SIGUSR1, True, 2, 0.0, 0),
        (signal.SIGTERM, True, 1, 0.0, 0),
        (signal.SIGTERM, True, 2, 5.0, 0),  # a launcher has passed on what the rank got already
        (signal.SIGTERM, True, 2, 0.0, -signal.SIGTERM),
    ],
)
def test_process_ends_at_once_in_set_up_and_at_a_second_sigterm(
    number: signal.Signals, deferred: bool, signals: int, same_s: float, status: int
) -> None:
    child = os.fork()
    if child == 0:
        preemption_module.SAME_SIGNAL_S = same_s
        preemption = Preemption()
        if deferred:
            preemption.defer()
        for _ in range(signals):
            os.kill(os.getpid(), number)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status

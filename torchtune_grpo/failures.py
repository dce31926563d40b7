"""One rank's failure ends all ranks with its message within seconds, whatever the others wait for.

A rank that fails while others wait for it in a collective would leave them there until the process group's timeout. So
every rank has a thread that looks into the store of the process group once a second: the first rank to fail leaves its
message there, the others find it, rank 0 prints it, and each ends. That needs no collective, so it works the same on
gloo and NCCL, under torchrun and without it. Only the standard library is imported here.
"""

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

TRACEBACK_VARIABLE = "TORCHTUNE_GRPO_TRACEBACK"
_POLL_S = 1.0
_FAREWELL_S = 10.0  # how long a rank waits for rank 0 to have told why, and rank 0 for the others to have left
_FIRST, _TOLD, _LEFT = "failure/first", "failure/told", "failure/left"


class RunError(RuntimeError):
    """Ends the run; its message says what failed and what to change, so that no traceback need be shown."""

    names_ranks = False  # whether the message says which ranks failed


def watch_ranks(store: Any, rank: int, world_size: int) -> None:
    """Starts to watch for the failure of another rank; ``store`` is the process group's (a torch ``Store``)."""
    global _watch
    _watch = _Watch(store, rank, world_size)


def stop_watching() -> None:
    """From here on a rank that leaves is no fault. Does nothing where no watch was started."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def end_run(message: str, status: int = 1) -> NoReturn:
    """Ends this process with exit code ``status`` and, where ranks are watched, all of them; rank 0 prints ``message``.

    Where several ranks fail, the first one's message and status count. From any thread; no collective.
    """
    watched = _watch
    if watched is not None:
        status = watched.fail(message, status)
    else:
        if own_rank() != 0:
            time.sleep(_FAREWELL_S)  # rank 0 speaks for all: where it failed too, torchrun ends this process meanwhile
        _tell_torchrun(message)
        _show(message)
        if threading.current_thread() is threading.main_thread():
            raise SystemExit(status)
    _leave(status)


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Ends the run where the block takes longer; None sets no limit.

    It works from a thread and leaves signals, and so the block's own timeouts, alone. Code that never lets go of the
    interpreter (one huge power of integers) stops that thread too: then this process alone ends, a few seconds later,
    with the line it stood at.
    """
    if seconds is None:
        yield
        return

    def end() -> None:
        stack = traceback.extract_stack(sys._current_frames()[caller])
        end_run(f"Error:\n{what}: got no result within {seconds:g} s, stopped at {place(stack)}\n(rank {own_rank()})")

    caller = threading.get_ident()
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + 2 * _FAREWELL_S, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def place(stack: traceback.StackSummary) -> str:
    """``file.py:12``, the innermost line of a stack."""
    return f"{stack[-1].filename}:{stack[-1].lineno}"


def own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


class _Watch:
    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store.clone()  # a connection of its own, which no waiting collective holds
        self._rank, self._others = rank, world_size - 1
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="failure watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)  # it may stand in a call to a store that is gone

    def fail(self, message: str, status: int) -> int:
        """Leaves the message for the others, or joins in the failure that was there before it; returns its status."""
        self.stop()
        own = json.dumps([status, message])
        try:
            first = self._store.compare_set(_FIRST, "", own).decode()
            if first == own:
                _tell_torchrun(message)
            return self._end_with_all(first)
        except RuntimeError:  # the store is gone, and rank 0 with it
            _show(message)
        return status

    def _look(self) -> None:
        while not self._stopped.wait(_POLL_S):
            try:
                if not self._store.check([_FIRST]):
                    continue
                status = self._end_with_all(self._store.get(_FIRST).decode())
            except RuntimeError as error:
                status = 1
                if not self._stopped.is_set():
                    _show(f"Error:\nlost the connection to rank 0, which was killed or has left: {error}")
            _leave(status)

    def _end_with_all(self, first: str) -> int:
        """Rank 0 tells the message, the others leave, then rank 0 does: the store may live in its process."""
        status, message = json.loads(first)
        if self._rank == 0:
            _show(message)
            self._store.set(_TOLD, "")
            _wait_until(lambda: self._store.add(_LEFT, 0) >= self._others)
        else:
            if not _wait_until(lambda: self._store.check([_TOLD])):
                _show(message)
            self._store.add(_LEFT, 1)
        return status


def _wait_until(done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _FAREWELL_S
    while not (reached := done()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return reached


_watch: _Watch | None = None


def _tell_torchrun(message: str) -> None:
    """torchrun ends its own report with what stands in this file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        record = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError), open(path, "w") as file:
            json.dump(record, file)


def _show(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _leave(status: int) -> NoReturn:
    """Without the interpreter's farewell, in which a collective that never ends would be waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

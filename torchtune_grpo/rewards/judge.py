"""The killable process that compares answers as mathematics, and its client.

math-verify and sympy cannot be trusted with text that a policy wrote: 9^{9^{9}} holds the GIL inside one
big-integer power, where neither a thread nor ``signal.alarm`` can stop it. So one helper process
(``judge_server.py``) imports them once and forks a child for each comparison, with a limit on its memory and
on its time; the child is killed when the time is over and takes all it allocated with it. The helper starts
at the first comparison, never imports torch, works under torchrun (one for each rank), and ends when this
process does, however that ends.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

_SERVER = Path(__file__).with_name("judge_server.py")
_STARTUP_S = 60.0
_STARVATION = 1.5  # how many times its processor time a comparison may take by the clock, as in the helper
_GRACE_S = 0.3  # what a fork, a kill and two pipes may add

_VERDICTS = {b"equal\n": True, b"different\n": False, b"unreadable gold\n": None}


class _Judge:
    """The client: one request at a time, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def compare(self, answer: str, gold: str, timeout_s: float) -> bool | None:
        request = json.dumps({"answer": answer, "gold": gold, "timeout_s": timeout_s}).encode() + b"\n"
        with self._lock:
            for _ in range(2):  # a helper that was killed has a successor, which is asked again
                process = self._running()
                try:
                    process.stdin.write(request)
                    return _VERDICTS[_read_line(process, _STARVATION * timeout_s + _GRACE_S)]
                except BrokenPipeError:
                    self._stop()
                except TimeoutError:  # starved of time, which says nothing about the answer
                    self._stop()
                    return None
                except BaseException:  # Ctrl-C: the reply that is still to come must not answer the next request
                    self._stop()
                    raise
            return None

    def start(self) -> None:
        with self._lock:
            self._running()

    def stop(self) -> None:
        with self._lock:
            self._stop()

    def _running(self) -> subprocess.Popen[bytes]:
        # In a forked child poll() finds no child of its own: it gets a helper of its own too.
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        # A session of its own, so that Ctrl-C reaches this process alone; the helper leaves when its stdin
        # ends. As a script it would have this folder on its path, where xml.py hides the standard library's.
        script = f"import runpy; runpy.run_path({str(_SERVER)!r}, run_name='__main__')"
        self._process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        try:
            greeting = _read_line(self._process, _STARTUP_S)
        except OSError:
            greeting = b""
        if greeting != b"ready\n":
            self._stop()
            raise RuntimeError("the answer judge did not start: is math-verify installed in this environment?")
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        chunk = os.read(process.stdout.fileno(), 256)
        if not chunk:
            raise BrokenPipeError
        line += chunk
    return line


_judge = _Judge()
atexit.register(_judge.stop)


def compare_math(answer: str, gold: str, timeout_s: float) -> bool | None:
    """Whether two LaTeX texts are equal as mathematics.

    False where the answer cannot be read or the comparison takes longer than ``timeout_s`` seconds of
    processor time (or 1.5 times that by the clock); None where the gold cannot be read in that time, or the
    helper process got no processor time or was killed twice over this one comparison.

    Raises:
        RuntimeError: the helper process cannot be started.
    """
    return _judge.compare(answer, gold, timeout_s)


def start_judge() -> None:
    """Start the helper process now, so that the first comparison does not wait for it."""
    _judge.start()

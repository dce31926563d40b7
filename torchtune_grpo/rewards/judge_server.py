"""The helper process behind ``judge.py``: JSON lines in on stdin, one verdict a line out on
stdout.

It imports math-verify once and forks a child for every comparison, so that nothing an answer does (time,
memory, a crash of the interpreter, a warmed cache) outlives it. The answer is parsed by a grammar and
evaluated by sympy; no part of it is ever evaluated as Python.
"""

import contextlib
import json
import logging
import os
import resource
import select
import signal
import sys
import time

from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from sympy import Basic, Eq, N, simplify

MEMORY_LIMIT_BYTES = 1 << 30
_RELATIVE_TOLERANCE = 1e-20
_DIGITS = 50
_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_WARM_UP = ((r"1+\frac{1}{e}", "1-e^x"), ("y=2x", "3x+y-1=0"), ("(1,2]", r"\{1, \sqrt{2}\}"))
_STARVATION = 1.5  # the limit is on processor time; on a busy machine a child may take this many times longer
_GOLD_READ, _EQUAL = b"g", b"e"


def main() -> None:
    """Serve until stdin ends."""
    logging.disable(logging.CRITICAL)
    replies = os.dup(1)
    os.dup2(2, 1)  # whatever prints must not garble the replies
    for gold, answer in _WARM_UP:  # every child inherits the parser's and sympy's caches
        _equal(_parse(gold), _parse(answer))
    os.write(replies, b"ready\n")
    for line in sys.stdin.buffer:
        os.write(replies, _compare_in_child(**json.loads(line)))


def _compare_in_child(answer: str, gold: str, timeout_s: float) -> bytes:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(answer, gold, timeout_s, writer)
    os.close(writer)
    try:
        progress = _read_until(reader, time.monotonic() + _STARVATION * timeout_s)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
    if _EQUAL in progress:
        return b"equal\n"
    return b"different\n" if _GOLD_READ in progress else b"unreadable gold\n"


def _read_until(reader: int, deadline: float) -> bytes:
    progress = b""
    while (left := deadline - time.monotonic()) > 0 and select.select([reader], [], [], left)[0]:
        chunk = os.read(reader, 16)
        if not chunk:
            break
        progress += chunk
    return progress


def _child(answer: str, gold: str, timeout_s: float, writer: int) -> None:
    """Never returns. Writes one byte when the gold is read and one if the answer equals it."""
    try:
        with contextlib.suppress(OSError, ValueError):  # macOS refuses a limit on address space
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
        # The default action of SIGPROF ends this process even inside C code, and even if the server is gone.
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        parsed_gold = _parse(gold)
        os.write(writer, _GOLD_READ)
        if _equal(parsed_gold, _parse(answer)):
            os.write(writer, _EQUAL)
    finally:
        os._exit(0)


def _parse(latex: str) -> Basic:
    return latex2sympy(
        normalize_latex(latex, _NORMALIZATION),
        is_real=not should_treat_as_complex(latex),
        convert_degrees=False,
        normalization_config=None,
    )


def _equal(gold: Basic, answer: Basic) -> bool:
    if isinstance(gold, Eq) and isinstance(answer, Eq):
        return _same_equation(gold, answer)
    return verify(gold, answer, numeric_precision=_DIGITS, timeout_seconds=None) and _same_size(gold, answer)


def _same_equation(gold: Eq, answer: Eq) -> bool:
    """Equal up to a constant factor. math-verify compares solutions and calls two equations without any
    equal."""
    left, right = simplify(gold.lhs - gold.rhs), simplify(answer.lhs - answer.rhs)
    if left.is_number or right.is_number:  # 0 = 1 and its like have no shape to compare
        return gold == answer
    return bool(simplify(left / right).is_number)


def _same_size(gold: Basic, answer: Basic) -> bool:
    """math-verify's tolerance is absolute, which makes all tiny numbers equal."""
    if not (getattr(gold, "is_number", False) and getattr(answer, "is_number", False)):
        return True
    left, right = N(gold, _DIGITS), N(answer, _DIGITS)
    return bool(abs(left - right) <= _RELATIVE_TOLERANCE * abs(left)) or simplify(gold - answer) == 0


if __name__ == "__main__":
    main()

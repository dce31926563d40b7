"""Grade completions from a file: ``python -m torchtune_grpo.grade FILE.jsonl``.

Each input line is an object with ``completion`` (string), ``gold`` (string) and ``prefilled_think`` (bool:
the prompt ended in ``<think>``). Each output line, on stdout, is the same object with three keys more:

- ``format``: the completion keeps the format contract (``torchtune_grpo.rewards.xml``).
- ``correct``: its final answer equals the gold answer, whatever the format. False for a blank or malformed
  gold, which no answer equals; null where the gold is one that the judge cannot read.
- ``reward``: 1.0 if ``format`` and ``correct``, else 0.0.

A row takes less than 2 seconds, whatever it holds. A line that cannot be read ends the run: the rows before
it are printed, the error goes to stderr and the exit code is 2.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtune_grpo.json_rows import RowError, read_lines
from torchtune_grpo.rewards.answers import answers_match, is_gradable
from torchtune_grpo.rewards.judge import start_judge
from torchtune_grpo.rewards.xml import parse_completion

TIMEOUT_S = 0.8  # of processor time; up to 1.2 by the clock
_KEYS = {"completion": str, "gold": str, "prefilled_think": bool}


def grade_row(row: dict[str, Any]) -> dict[str, Any]:
    """The row with ``format``, ``correct`` and ``reward`` added."""
    parsed = parse_completion(row["completion"], row["prefilled_think"])
    correct = answers_match(parsed.answer, row["gold"], TIMEOUT_S) if is_gradable(row["gold"]) else False
    reward = 1.0 if parsed.well_formed and correct else 0.0
    return {**row, "format": parsed.well_formed, "correct": correct, "reward": reward}


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The file's rows, checked; blank lines are passed over.

    Raises:
        RowError: a line is no JSON object, or a key is missing or of another type; names the line and the
        key. OSError: the file cannot be read.
    """
    for where, row in read_lines(path):
        for key, kind in _KEYS.items():
            if key not in row:
                raise RowError(f"{where}: missing the key {key!r}, expected a {kind.__name__}")
            if not isinstance(row[key], kind):
                raise RowError(f"{where}: {key!r} is a {type(row[key]).__name__}, expected a {kind.__name__}")
        yield row


def main() -> int:
    """Grade the file named on the command line; the exit code is 0, or 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m torchtune_grpo.grade", description="Grade completions.")
    parser.add_argument("file", type=Path, help="JSON lines with completion, gold and prefilled_think")
    path = parser.parse_args().file
    try:
        start_judge()
        for row in read_rows(path):
            print(json.dumps(grade_row(row)), flush=True)
    except (RowError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

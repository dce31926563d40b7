"""Rows of a file of JSON objects, each with the place that a message can name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class RowError(ValueError):
    """A row is not what it should be; the message starts with its place."""


def read_lines(path: Path) -> Iterator[tuple[str, Row]]:
    """``("FILE:LINE", object)`` of every line that is not blank. UTF-8, with or without a byte order mark.

    Raises:
        RowError: a line is no JSON object. OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", checked(parse(line, f"{path}:{number}"), f"{path}:{number}")


def parse(text: bytes, where: str) -> Any:
    """The JSON value of ``text``. Raises RowError."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RowError(f"{where}: not valid JSON: {error}") from error


def checked(value: Any, where: str) -> Row:
    """``value`` if it is a JSON object. Raises RowError."""
    if not isinstance(value, dict):
        raise RowError(f"{where}: got a JSON {type(value).__name__}, expected an object")
    return value

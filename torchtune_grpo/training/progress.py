"""Progress bars of the phases of a step."""

import sys
from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress_bar(items: Iterable[T], description: str, *, enabled: bool) -> Iterable[T]:
    """``items``, with a bar on stderr that vanishes when done; silent where stderr is no terminal.

    ``enabled``: whether this is rank 0.
    """
    silent = not (enabled and sys.stderr.isatty())
    return tqdm(items, desc=description, disable=silent, leave=False, dynamic_ncols=True)

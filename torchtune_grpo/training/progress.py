"""Progress bars of the phases of a step."""

import sys
from collections.abc import Iterable
from typing import TypeVar

import torch.distributed as dist
from tqdm import tqdm

T = TypeVar("T")


def say(text: str) -> None:
    """Prints a line on stdout without tearing the bars that are open."""
    tqdm.write(text)
    sys.stdout.flush()


def progress_bar(items: Iterable[T], description: str) -> Iterable[T]:
    """``items``, with a bar on rank 0's stderr that vanishes when done; silent where stderr is no terminal."""
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    silent = not (is_main and sys.stderr.isatty())
    return tqdm(items, desc=description, disable=silent, leave=False, dynamic_ncols=True)

"""Examples, data sets, and the ways to split, mix and compare them."""

import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torchtune_grpo.config import ConfigError
from torchtune_grpo.json_rows import RowError, checked, parse, read_lines
from torchtune_grpo.rewards.answers import is_gradable
from torchtune_grpo.seeds import mix_seed


@dataclass(frozen=True, kw_only=True)
class Example:
    """One question with its gold answer.

    ``answer`` is the gold string; ``solution`` the completion to imitate, without the prefilled ``<think>``
    and without the end token; ``source`` the name of the data set that the row came from.
    """

    question: str
    answer: str
    solution: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Examples, and how many rows were left out for which reason."""

    examples: Sequence[Example]
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.examples)

    def fingerprint(self) -> str:
        """The number of rows and a hash of all that they hold, in their order."""
        digest = blake2b(digest_size=16)
        for row in self.examples:
            digest.update(repr((row.question, row.answer, row.solution, row.source)).encode())
        return f"{len(self)} rows, BLAKE2 {digest.hexdigest()}"


Partition = Callable[[int], bool]
"""Whether the row of this index belongs to the partition."""


def parse_partition(text: str) -> Partition:
    """``"first-last/n"``: row i belongs to part ``i % n``; the parts first..last, both included, are kept.

    Rows are dealt out in turn so that every part of a sorted file has the same mixture, and they are counted
    before any row is dropped, so that ``0-0/10`` and ``1-9/10`` stay disjoint and exhaustive whatever is
    dropped.

    Raises:
        ConfigError: not of this form, or not ``0 <= first <= last < n``.
    """
    match = re.fullmatch(r"(\d+)-(\d+)/(\d+)", str(text).strip())
    first, last, parts = (int(group) for group in match.groups()) if match else (0, 0, 0)
    if not first <= last < parts:
        raise ConfigError(
            f"`partition` is {text!r}; expected 'first-last/n' with 0 <= first <= last < n, such as '0-0/10'"
        )
    return lambda index: first <= index % parts <= last


def load_rows(path: str, *, split: str, name: str | None) -> Iterator[tuple[str, Mapping]]:
    """Rows of a data set on the Hugging Face hub, or of a local .jsonl, .json or .parquet file, with their places.

    A local .json holds one list of rows, or a row a line. Files are read here rather than by ``datasets``, so that a
    fault is named with its line and nothing is copied into a cache.

    Args:
        path: name on the hub, or the file.
        split: split on the hub; a local file is one split.
        name: configuration on the hub.

    Raises:
        ConfigError: there is no such file, a row of it cannot be read, or the hub's data set cannot be loaded.
    """
    read = _READERS.get(Path(path).suffix)
    if not path or (read and not os.path.isfile(path)):
        raise ConfigError(f"`path` is {path!r}; there is no such file")
    if read is None and (os.path.isfile(path) or os.path.isabs(path) and not os.path.isdir(path)):
        raise ConfigError(f"`path` is {path!r}; expected a .jsonl, .json or .parquet file, or a name on the hub")
    if read is None:
        yield from _hub_rows(path, split, name)
        return
    empty = True
    try:
        for row in read(Path(path)):
            empty = False
            yield row
    except RowError as error:
        raise ConfigError(f"`path`: {error}") from error
    except (OSError, ValueError) as error:  # of pyarrow
        raise ConfigError(f"`path`: cannot read {path}: {error}") from error
    if empty:
        raise ConfigError(f"`path`: {path} holds no row")


def _hub_rows(path: str, split: str, name: str | None) -> Iterator[tuple[str, Mapping]]:
    import datasets

    try:
        rows = datasets.load_dataset(path, name, split=split)
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:  # StopIteration: no row
        raise ConfigError(
            f"cannot load `path` {path!r}, `split` {split!r}: {error}. Check both, or name a local .jsonl or "
            ".parquet file where the hub cannot be reached"
        ) from error
    return _placed(rows, path)


def _json_rows(path: Path) -> Iterable[tuple[str, Mapping]]:
    text = path.read_bytes()
    if not text.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return read_lines(path)
    return [(where, checked(row, where)) for where, row in _placed(parse(text, str(path)), path)]


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        yield from _placed((row for batch in file.iter_batches() for row in batch.to_pylist()), path)


def _placed(rows: Iterable[Any], path: str | Path) -> Iterator[tuple[str, Any]]:
    return ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))


_READERS = {".jsonl": read_lines, ".json": _json_rows, ".parquet": _parquet_rows}


def collect(
    rows: Iterable[tuple[str, Mapping]],
    parse_row: Callable[[Mapping], Example | str],
    *,
    fields: Sequence[str],
    partition: str,
    limit: int | None,
    chosen: Callable[[Mapping], bool] = lambda row: True,
) -> Dataset:
    """The usable rows of a partition, at most ``limit``; the others are counted, never dropped unseen.

    ``rows`` come with their places, for messages.
    ``chosen`` says which rows are wanted at all (the others are not counted); ``parse_row`` turns a row into an
    example or into the reason why it cannot. Rows with nothing in one of ``fields`` are dropped too, and rows
    whose gold answer no judge can read (``answer_not_gradable``): whatever the policy wrote, it could not be
    paid.

    Raises:
        ConfigError: a row has not even the names of ``fields``, a malformed partition, or a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"`limit` is {limit}; expected a positive number of rows, or null for all")
    member = parse_partition(partition)
    examples: list[Example] = []
    dropped: Counter[str] = Counter()
    for index, (where, row) in enumerate(rows):
        if len(examples) == limit:
            break
        if not member(index) or not chosen(row):
            continue
        if missing := set(fields) - set(row):
            raise ConfigError(f"`path`: {where}: got the fields {list(row)}, expected also {sorted(missing)}")
        example = _fault(row, fields) or parse_row(row)
        if isinstance(example, Example) and not is_gradable(example.answer):
            example = "answer_not_gradable"
        if isinstance(example, str):
            dropped[example] += 1
        else:
            examples.append(example)
    return Dataset(examples=examples, dropped=dict(dropped))


def _fault(row: Mapping, fields: Sequence[str]) -> str | None:
    """Why a row has nothing to parse, None where it has."""
    if not all(row[name] for name in fields):
        return "field_empty"
    return None if all(_is_text(row[name]) for name in fields) else "field_not_text"


def _is_text(value: Any) -> bool:
    """A string that UTF-8 can spell; JSON can also hold half of a surrogate pair, which no tokenizer takes."""
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):
        return False
    return True


def mixed_dataset(datasets: list[Dataset], weights: list[float], size: int | None = None, seed: int = 0) -> Dataset:
    """``size`` rows drawn from several data sets in proportion to ``weights``, shuffled.

    A data set gives no row twice before it has given each once. ``size=None`` takes the largest mixture that
    repeats no row. Every row keeps its own ``source``; ``dropped`` adds up what the parts have dropped.

    Raises:
        ConfigError: not one positive weight for each data set, an empty data set, or a size below 1.
    """
    if not datasets or len(weights) != len(datasets) or not all(weight > 0 for weight in weights):
        raise ConfigError(f"`weights` is {list(weights)}; expected {len(datasets)} positive numbers, one a data set")
    if not all(len(dataset) for dataset in datasets):
        raise ConfigError(f"`datasets` have {[len(d) for d in datasets]} rows; expected at least one in each")
    if size is None:
        rows_per_weight = min(len(dataset) / weight for dataset, weight in zip(datasets, weights, strict=True))
        # 0.7 * (3 / 0.7) is a little less than 3
        counts = [int(weight * rows_per_weight + 1e-6) for weight in weights]
    elif size < 1:
        raise ConfigError(f"`size` is {size}; expected a positive number of rows, or null")
    else:
        counts = _shares(size, weights)
    rng = random.Random(mix_seed(seed, len(datasets)))
    examples = [example for dataset, n in zip(datasets, counts, strict=True) for example in _draw(dataset, n, rng)]
    rng.shuffle(examples)
    dropped = sum((Counter(dataset.dropped) for dataset in datasets), Counter())
    return Dataset(examples=examples, dropped=dict(dropped))


def _shares(size: int, weights: Sequence[float]) -> list[int]:
    """``size`` split in proportion to ``weights``; what rounding leaves goes to the largest remainders."""
    exact = [size * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: size - sum(counts)]:
        counts[i] += 1
    return counts


def _draw(dataset: Dataset, count: int, rng: random.Random) -> list[Example]:
    """``count`` examples: whole shuffled passes, then the start of another."""
    drawn: list[Example] = []
    while len(drawn) < count:
        drawn += rng.sample(dataset.examples, min(len(dataset), count - len(drawn)))
    return drawn


def overlap(train: Dataset, evaluation: Dataset) -> int:
    """How many evaluation questions also stand in ``train``, letter case and white space aside."""
    seen = {_normalised(example.question) for example in train.examples}
    return sum(_normalised(example.question) in seen for example in evaluation.examples)


def _normalised(question: str) -> str:
    return "".join(question.casefold().split())

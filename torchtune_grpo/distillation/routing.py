"""Which teacher a row belongs to: data source -> alias -> checkpoint -> a number that stays the same.

A checkpoint's identity is the resolved path of its Hugging Face folder (relative parts, symbolic links and "the newest
checkpoint of this run" worked out). Aliases of one folder share one teacher. A teacher's number is its place among the
sorted paths, so it depends neither on the order of the YAML nor on what the aliases are called.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtune_grpo.config import ConfigError
from torchtune_grpo.config_values import nearest


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Data sources -> aliases of teachers.

    ``default`` is the alias for sources that are not listed; null is strict: each source of the training data must be
    listed.
    """

    sources: dict[str, str] = field(default_factory=dict)
    default: str | None = None


@dataclass(frozen=True, kw_only=True)
class TeacherIndex:
    """The loaded teachers in the order of their numbers, and how rows find theirs.

    ``checkpoints``: resolved folders, one a teacher; ``names``: each teacher's aliases joined by ``+``, for metrics;
    ``number_of_source``: source -> teacher, None where rows are not tagged (one teacher, ``routing: null``).
    """

    checkpoints: tuple[str, ...]
    names: tuple[str, ...]
    number_of_source: Mapping[str, int] | None

    def __len__(self) -> int:
        return len(self.checkpoints)

    def column(self, source: Sequence[str]) -> Tensor | None:
        """The teacher of each row, int64 ``[N]`` on CPU; None where rows are not tagged."""
        if self.number_of_source is None:
            return None
        return torch.tensor([self.number_of_source[name] for name in source], dtype=torch.int64)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON values; ``check_resumed_teachers`` reads it."""
        return {"tagged": self.number_of_source is not None, "checkpoints": list(self.checkpoints)}


def index_teachers(folders: Mapping[str, Path], routing: Routing | None, sources: Collection[str]) -> TeacherIndex:
    """Numbers the teachers and routes the sources of the training data to them.

    Args:
        folders: alias -> the teacher's Hugging Face folder.
        sources: those that occur in the training data.

    Raises:
        ConfigError: no teacher; several and no ``routing``; an alias that ``teachers`` lacks; a source without a
            teacher in strict mode; a listed source that the data lacks (a typing error would fall to the default
            unseen); a teacher to which no source leads.
    """
    if not folders:
        raise ConfigError("teachers: got none, expected at least one")
    checkpoints = sorted({str(folder.resolve()) for folder in folders.values()})
    number = {alias: checkpoints.index(str(folder.resolve())) for alias, folder in folders.items()}
    names = tuple("+".join(sorted(a for a in number if number[a] == i)) for i in range(len(checkpoints)))
    number_of_source = None
    if routing is not None:
        number_of_source = {source: number[alias] for source, alias in _aliases(routing, number, sources).items()}
        idle = [names[i] for i in range(len(checkpoints)) if i not in number_of_source.values()]
        if idle:
            raise ConfigError(f"routing: no source of the training data leads to the teachers {idle}: remove them")
    elif len(checkpoints) > 1:
        raise ConfigError(
            f"routing: got null, expected a Routing that says which of the {len(checkpoints)} teachers each source has"
        )
    return TeacherIndex(checkpoints=tuple(checkpoints), names=names, number_of_source=number_of_source)


def _aliases(routing: Routing, known: Collection[str], sources: Collection[str]) -> dict[str, str]:
    """The alias of each source of the data."""
    asked = {f"sources.{source}": alias for source, alias in routing.sources.items()}
    for key, alias in (asked | ({"default": routing.default} if routing.default is not None else {})).items():
        if alias not in known:
            raise ConfigError(
                f"routing.{key}: got {alias!r}, expected one of the teachers {sorted(known)}{nearest(alias, known)}"
            )
    absent = sorted(set(routing.sources) - set(sources))
    if absent:
        raise ConfigError(
            f"routing.sources: got {absent}, which no training row has, expected some of {sorted(sources)}"
        )
    lacking = sorted(set(sources) - set(routing.sources))
    if lacking and routing.default is None:
        raise ConfigError(
            f"routing.sources: the sources {lacking} of the training data have no teacher; list them, or name a default"
        )
    return {source: routing.sources.get(source, routing.default) for source in sources}


def check_resumed_teachers(saved: Mapping[str, Any] | None, current: Mapping[str, Any], path: Path) -> None:
    """Holds the teachers of a checkpoint (``TeacherIndex.state``) against those of the config.

    Raises:
        ConfigError: a teacher was dropped or replaced, has another number now, or rows were tagged then and are not
            now, or the reverse. The message shows both lists.
    """
    if saved is None:
        raise ConfigError(f"resume: {path} was saved without teachers, expected a checkpoint of this recipe")
    then, now = saved["checkpoints"], current["checkpoints"]
    if saved["tagged"] != current["tagged"]:
        words = {True: "tagged with their teacher", False: "not tagged"}
        problem = f"routing: rows were {words[saved['tagged']]} and are {words[current['tagged']]}"
    elif dropped := [checkpoint for checkpoint in then if checkpoint not in now]:
        problem = f"teachers: {dropped} dropped or replaced"
    elif moved := [checkpoint for i, checkpoint in enumerate(then) if now.index(checkpoint) != i]:
        problem = f"teachers: {moved} renumbered"
    else:
        return
    raise ConfigError(
        f"{problem}, but {path} belongs to the teachers\n  {_numbered(then)}\n"
        f"and the config names\n  {_numbered(now)}\n"
        "Set them back, or start another run: another `output_dir`, with `weights` naming this checkpoint."
    )


def _numbered(checkpoints: Sequence[str]) -> str:
    return "\n  ".join(f"{i}: {checkpoint}" for i, checkpoint in enumerate(checkpoints))


def rows_by_teacher(column: Tensor | None, num_rows: int, num_teachers: int) -> list[Tensor]:
    """The rows of each teacher, int64 on CPU and ascending, one tensor a teacher (empty where it has none).

    A column is obeyed whenever there is one, also with one teacher; without one all rows are the only teacher's.

    Raises:
        ValueError: no column but several teachers; a column of another length than the rows; a number that no loaded
            teacher has.
    """
    if column is None:
        if num_teachers != 1:
            raise ValueError(f"got no teacher index, expected one a row, as {num_teachers} teachers are loaded")
        return [torch.arange(num_rows)]
    if column.shape != (num_rows,):
        raise ValueError(f"got a teacher index of shape {tuple(column.shape)}, expected one number for {num_rows} rows")
    unknown = sorted(set(column.tolist()) - set(range(num_teachers)))
    if unknown:
        raise ValueError(f"got the teacher indices {unknown}, expected those of the {num_teachers} loaded teachers")
    return [(column == i).nonzero().flatten() for i in range(num_teachers)]

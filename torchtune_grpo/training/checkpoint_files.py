"""The files of checkpoints: found, made durable before they become visible, and recognised when they are damaged.

``manifest.json`` holds size and CRC-32 of every other file, but for ``metrics.json``, which may be written later.
"""

import errno
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

from torchtune_grpo.collectives import all_gather_objects, rank, world_size
from torchtune_grpo.config import ConfigError

MANIFEST, METRICS = "manifest.json", "metrics.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NAME = re.compile(r"step_(\d{8,})")
_WRITER = re.compile(r"(?:__|rank_)(\d+)")  # torch DCP's shards, and what each rank keeps for itself
_BLOCK = 1 << 22

Manifest = dict[str, tuple[int, int]]
"""Path within the checkpoint -> (bytes, CRC-32)."""


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in a ``checkpoints`` folder, None where there is none."""
    return next(reversed(complete_checkpoints(folder)), None)


def resolve_weights(path: str, *, key: str = "weights") -> Path:
    """The Hugging Face folder meant by ``path``: itself, a checkpoint's, or the newest of a run's output_dir.

    Raises:
        ConfigError: ``path`` is none of these; ``key`` is the config key that it names.
    """
    given, found, problem, advice = Path(path), [], "no folder", ""
    if path and os.path.isdir(path):
        newest = newest_checkpoint(given / "checkpoints")
        for folder in (given, given / "hf", *([newest / "hf"] if newest else [])):
            if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
                return folder
        found = sorted(child.name for child in given.iterdir())
        problem = f"a folder with {', '.join(found[:10]) or 'nothing in it'}"
    if any(name.endswith(PICKLED) for name in found):
        advice = (
            "; pickled weights are never opened, as they can run code: convert them where you trust them, with "
            "transformers' from_pretrained(...).save_pretrained(...)"
        )
    raise ConfigError(
        f"{key}: got {path!r}, which is {problem}; expected a folder with config.json and *.safetensors, "
        f"a checkpoint folder step_*, or the output_dir of a run with a checkpoint{advice}"
    )


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return [path for path in by_step(folder) if (path / "state.json").is_file()]


def by_step(folder: Path) -> list[Path]:
    """All folders named like checkpoints, oldest first."""
    found = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's ``state.json``: step, extra, config, versions, world size."""
    return json.loads((path / "state.json").read_text())


def read_metrics_of(path: Path) -> dict[str, float]:
    """A checkpoint's ``metrics.json``; nothing where it cannot be read, as it is no part of the manifest."""
    try:
        return json.loads((path / METRICS).read_text())
    except (OSError, ValueError):
        return {}


def own_files(folder: Path) -> Manifest:
    """Sizes and checksums of the files that this rank wrote, every rank its own. Local."""
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    return {name: _checksum(folder / name) for name in names if _writer(name) == rank()}


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, None for one that is as it was written; the same on every rank.

    Each rank reads its share of the files. Collective: one all-gather of Python objects.
    """
    try:
        expected = json.loads((folder / MANIFEST).read_text())
        mine = sorted(expected.items())[rank() :: world_size()]
        problems = [problem for name, (size, crc) in mine if (problem := _problem(folder, name, size, crc))]
    except (FileNotFoundError, ValueError, AttributeError, TypeError) as error:  # a disk that fails is no damage
        problems = [f"{MANIFEST}: {error}"]
    found = sorted({problem for part in all_gather_objects(problems) for problem in part})
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more if found else None


def write_durably(path: Path, text: str) -> None:
    """Writes a small file, in one rename: a kill leaves the old one or the new one."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text)
    _fsync(partial)
    partial.replace(path)
    _fsync(path.parent)


def complete(partial: Path, final: Path) -> None:
    """Makes the folder durable, then visible: after the rename nothing of it can be missing."""
    for path in (*partial.rglob("*"), partial):
        _fsync(path)
    partial.rename(final)
    _fsync(final.parent)


def _problem(folder: Path, name: str, size: int, crc: int) -> str | None:
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != size:
        return f"{name} has {path.stat().st_size} bytes, expected {size}"
    return None if _checksum(path) == (size, crc) else f"{name} is not what was written (CRC-32 differs)"


def _writer(name: str) -> int:
    found = _WRITER.match(Path(name).name)
    return int(found[1]) if found else 0


def _checksum(path: Path) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):  # not all file systems sync folders
            raise
    finally:
        os.close(descriptor)

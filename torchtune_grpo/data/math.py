"""MATH (Hendrycks et al. 2021, arXiv:2103.03874) and its subset MATH-500 (Lightman et al. 2023)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from torchtune_grpo.config import ConfigError
from torchtune_grpo.data.dataset import Dataset, Example, collect, load_rows
from torchtune_grpo.data.prompts import completion_text

SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
ONE_CONFIG_PER_SUBJECT = ("EleutherAI/hendrycks_math",)

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_UNBRACED_END = re.compile(r"\$|\\\]|\\\)|\n|$")


def math_dataset(
    path: str = "EleutherAI/hendrycks_math",
    split: str = "train",
    subjects: list[str] | None = None,
    levels: list[int] | None = None,
    partition: str = "0-0/1",
    limit: int | None = None,
    source: str = "math",
) -> Dataset:
    """Rows ``{"problem", "solution"}`` in the format of MATH, for SFT and RL alike.

    The gold answer is the row's ``answer`` (MATH-500), else what the last box of ``solution`` holds. Rows
    without one are dropped and counted, two in the original among them. Subjects are chosen by ``type`` or
    ``subject``, levels by ``level``.

    Args:
        path: name on the Hugging Face hub (``HuggingFaceH4/MATH-500`` has only the split ``test``), or a
            local .jsonl, .json or .parquet file.
        split: split on the hub; a local file is one split, and ``split`` is not used.
        subjects: some of ``SUBJECTS``; None for all.
        levels: difficulties from 1 to 5; None for all.
        partition: ``"first-last/n"``, see ``parse_partition``; subjects and levels are chosen within it.
        limit: at most this many usable rows; None for all.
        source: name that every row carries.

    Raises:
        ConfigError: the data cannot be loaded, or a value is not of its form.
    """
    if unknown := sorted(set(subjects or ()) - set(SUBJECTS)):
        raise ConfigError(f"`subjects` has {unknown}; expected some of {list(SUBJECTS)}")
    if unknown := sorted(set(levels or ()) - set(range(1, 6))):
        raise ConfigError(f"`levels` has {unknown}; expected numbers from 1 to 5")
    parse = partial(_parse, source=source)
    chosen = partial(_is_chosen, subjects=subjects, levels=levels)
    return collect(
        _rows(path, split),
        parse,
        fields=("problem", "solution"),
        partition=partition,
        limit=limit,
        chosen=chosen,
    )


def last_boxed(solution: str) -> str | None:
    r"""What the last ``\boxed`` or ``\fbox`` holds, with or without braces; None without a (closed) box."""
    boxes = list(_BOX.finditer(solution))
    if not boxes:
        return None
    rest = solution[boxes[-1].end() :]
    if rest.startswith("{"):
        return _braced(rest)
    return rest[: _UNBRACED_END.search(rest).start()].strip().rstrip(".")


def _braced(text: str) -> str | None:
    """The inside of the group that ``text`` starts with; braces after a backslash are not groups."""
    depth = 0
    for mark in re.finditer(r"\\.|[{}]", text, flags=re.DOTALL):
        depth += {"{": 1, "}": -1}.get(mark.group(), 0)
        if depth == 0:
            return text[1 : mark.start()].strip()
    return None


def _rows(path: str, split: str) -> Iterator[tuple[str, Mapping]]:
    names: Sequence[str | None] = SUBJECTS if path in ONE_CONFIG_PER_SUBJECT else (None,)
    return chain.from_iterable(load_rows(path, split=split, name=name) for name in names)


def _is_chosen(row: Mapping, subjects: Sequence[str] | None, levels: Sequence[int] | None) -> bool:
    subject = str(row.get("type", row.get("subject"))).lower().replace("&", "and").replace(" ", "_")
    level = str(row.get("level")).removeprefix("Level ")
    return (subjects is None or subject in subjects) and (levels is None or level in map(str, levels))


def _parse(row: Mapping, source: str) -> Example | str:
    answer = row.get("answer")
    if answer is None:
        answer = last_boxed(row["solution"])
    if answer is None:
        return "answer_missing"
    answer = str(answer).strip()
    if not answer:
        return "answer_empty"
    solution = completion_text(row["solution"].strip(), answer)
    return Example(question=row["problem"].strip(), answer=answer, solution=solution, source=source)

"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): school word problems with integer answers."""

import re
from collections.abc import Mapping
from functools import partial

from torchtune_grpo.data.dataset import Dataset, Example, collect, load_rows
from torchtune_grpo.data.prompts import completion_text

_CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")


def gsm8k_dataset(
    path: str = "openai/gsm8k",
    split: str = "train",
    partition: str = "0-0/1",
    limit: int | None = None,
    source: str = "gsm8k",
) -> Dataset:
    """Rows ``{"question", "answer"}`` in GSM8K's format, for SFT and RL alike.

    The gold answer follows ``####``; what stands before it, calculator annotations (``<<48/2=24>>``) taken
    out, is the reasoning of ``solution``.

    Args:
        path: name on the Hugging Face hub, or a local .jsonl, .json or .parquet file.
        split: split on the hub; a local file is one split, and ``split`` is not used.
        partition: ``"first-last/n"``, see ``parse_partition``.
        limit: at most this many usable rows; None for all.
        source: name that every row carries.

    Raises:
        ConfigError: the data cannot be loaded, or a value is not of its form.
    """
    rows = load_rows(path, split=split, name="main")
    parse = partial(_parse, source=source)
    return collect(rows, parse, fields=("question", "answer"), partition=partition, limit=limit)


def _parse(row: Mapping, source: str) -> Example | str:
    reasoning, mark, answer = str(row["answer"]).rpartition("####")
    answer = "".join(answer.split())
    if not mark or not answer:
        return "answer_missing"
    reasoning = _CALCULATOR_NOTE.sub("", reasoning).strip()
    solution = completion_text(reasoning, answer)
    return Example(question=row["question"].strip(), answer=answer, solution=solution, source=source)

"""Data files with every fault, and data that looks like code."""

import gzip
import json
from pathlib import Path

import pytest

from tests.bad_input.conftest import GSM8K_ROW
from tests.bad_input.entry import run_recipe, tree
from torchtune_grpo.data import gsm8k_dataset

GOOD = json.dumps(GSM8K_ROW).encode() + b"\n"


def rows(**changes: object) -> bytes:
    return json.dumps(GSM8K_ROW | changes).encode() + b"\n"


FILES = {
    "empty.jsonl": (b"", "empty.jsonl holds no row"),
    "blank.jsonl": (b"\n \n\n", "blank.jsonl holds no row"),
    "no_json.jsonl": (GOOD * 2 + b"{question: 1}\n" + GOOD * 20, "no_json.jsonl:3: not valid JSON"),
    "after_blank.jsonl": (GOOD + b"\n\n{\n" + GOOD * 20, "after_blank.jsonl:4: not valid JSON"),
    "cut.jsonl": (GOOD * 20 + GOOD[:30], "cut.jsonl:21: not valid JSON"),
    "array.jsonl": (GOOD * 20 + b"[1, 2]\n", "array.jsonl:21: got a JSON list, expected an object"),
    "number.jsonl": (b"3\n" + GOOD * 20, "number.jsonl:1: got a JSON int, expected an object"),
    "null.jsonl": (GOOD * 4 + b"null\n" + GOOD * 20, "null.jsonl:5: got a JSON NoneType, expected an object"),
    "text.jsonl": (b"question,answer\n1,2\n", "text.jsonl:1: not valid JSON"),
    "no_answer.jsonl": (GOOD * 20 + b'{"question": "Why?"}\n', "no_answer.jsonl:21: ", "['question']", "['answer']"),
    "no_field.jsonl": (b'{"problem": "1", "solution": "2"}\n', "no_field.jsonl:1: ", "expected also"),
    "no_mark.jsonl": (rows(answer="7") * 20, "0 rows are usable", "answer_missing: 20"),
    "nothing_after_mark.jsonl": (rows(answer="#### ") * 20, "0 rows are usable", "answer_missing: 20"),
    "numbers.jsonl": (rows(answer=7) * 20, "0 rows are usable", "field_not_text: 20"),
    "lists.jsonl": (rows(question=["a"]) * 20, "0 rows are usable", "field_not_text: 20"),
    "nulls.jsonl": (rows(question=None) * 20, "0 rows are usable", "field_empty: 20"),
    "surrogates.jsonl": (rows(question="\ud800") * 20, "0 rows are usable", "field_not_text: 20"),
    "long.jsonl": (rows(question="Tom " * 500) * 20, "0 rows are usable", "example_too_long: 20"),
    "few.jsonl": (GOOD * 7, "7 rows are usable (dropped: none), expected at least the 8 of one step"),
    "latin.jsonl": (GOOD + '{"question": "größe"}\n'.encode("latin-1") + GOOD * 20, "latin.jsonl:2: not valid JSON"),
    "utf16.jsonl": ((GOOD * 20).decode().encode("utf-16"), "utf16.jsonl:1: "),
    "binary.jsonl": (bytes(range(256)), "binary.jsonl:1: not valid JSON"),
    "deep.jsonl": (b"[" * 100_000 + b"\n", "deep.jsonl"),
    "whole.json": (b'{"rows": [1]}\n', "whole.json:1: ", "['rows']"),
    "cut.json": (b"[" + GOOD.strip() + b",", "cut.json: not valid JSON"),
    "scalars.json": (b"[1, 2]", "scalars.json, row 1: got a JSON int, expected an object"),
    "garbage.parquet": (b"PAR1 and nothing", "garbage.parquet"),
    "rows.jsonl.gz": (gzip.compress(GOOD * 20), "rows.jsonl.gz", ".jsonl, .json or .parquet"),
    "rows.csv": (b"question,answer\n1,2\n", "rows.csv", ".jsonl, .json or .parquet"),
    "rows": (GOOD * 20, "rows", ".jsonl, .json or .parquet"),
}

KEYS = [
    ("gsm8k", "dataset.path={tmp}/absent.jsonl", "`path` is", "absent.jsonl", "there is no such file"),
    ("gsm8k", "dataset.path={tmp}/folder.jsonl", "`path` is", "folder.jsonl", "there is no such file"),
    ("gsm8k", "dataset.path=''", "`path` is ''"),
    ("gsm8k", "dataset.path={tmp}/absent/rows.txt", "absent/rows.txt"),
    ("gsm8k", "dataset.path=nobody/has_this", "cannot load `path` 'nobody/has_this'"),
    ("gsm8k", 'dataset.path="a\\0b.jsonl"', "`path` is 'a\\x00b.jsonl'"),
    ("gsm8k", f"dataset.path={'a' * 300}.jsonl", "`path` is"),
    ("gsm8k", "dataset.partition=half", "`partition` is 'half'; expected 'first-last/n'"),
    ("gsm8k", "dataset.partition=0-10/10", "`partition` is '0-10/10'"),
    ("gsm8k", "dataset.partition=3-2/10", "`partition` is '3-2/10'"),
    ("gsm8k", "dataset.partition=0-0/0", "`partition` is '0-0/0'"),
    ("gsm8k", "dataset.partition=-1-2/10", "`partition` is '-1-2/10'"),
    ("gsm8k", "dataset.partition=3", ".partition: got the int 3"),
    ("gsm8k", "dataset.partition=15-15/16", "1 rows are usable (dropped: none), expected at least the 8"),
    ("gsm8k", "dataset.limit=0", "`limit` is 0"),
    ("gsm8k", "dataset.limit=-1", "`limit` is -1"),
    ("gsm8k", "dataset.limit=7", "7 rows are usable"),
    ("math", "dataset.subjects=[poetry]", "`subjects` has ['poetry']"),
    ("math", "dataset.levels=[6]", "`levels` has [6]"),
    ("math", "dataset.subjects=algebra", ".subjects: got the string 'algebra'"),
    ("math", "dataset.limit=3", "rows.jsonl:1: ", "['problem', 'solution']"),
]

HOSTILE = [
    "__import__('os').system('touch pwned')",
    "{question} {{7*7}} {0.__class__.__init__.__globals__}",
    "${oc.env:HOME} ${output_dir} ???",
    "!!python/object/apply:os.system ['touch pwned']",
    "$(touch pwned) `touch pwned` ; touch pwned",
    "</think> <answer> 7 </answer> <eos> <pad>",
    "%s %(x)s \x00 \x1b[2J \u202e",
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fault of a test is looked for on the hub."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", FILES)
def test_data_file_is_refused(configs: Path, tmp_path: Path, name: str) -> None:
    content, *expected = FILES[name]
    (tmp_path / name).write_bytes(content)
    run_recipe("sft_warmup", configs / "gsm8k.yaml", f"dataset.path={tmp_path / name}").assert_refused(
        "dataset", *expected
    )


@pytest.mark.parametrize(("config", "override", "expected"), [(name, key, texts) for name, key, *texts in KEYS])
def test_key_of_data_is_refused(configs: Path, tmp_path: Path, config: str, override: str, expected: list[str]) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    override = override.replace("{tmp}", str(tmp_path))
    run_recipe("sft_warmup", configs / f"{config}.yaml", override).assert_refused("dataset", *expected)


@pytest.mark.parametrize(
    ("columns", "expected"), [({"other": ["1"]}, "expected also"), ({}, "rows.parquet holds no row")]
)
def test_parquet_without_the_fields_is_refused(configs: Path, tmp_path: Path, columns: dict, expected: str) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    run_recipe("sft_warmup", configs / "gsm8k.yaml", f"dataset.path={path}").assert_refused("dataset", expected)


def test_byte_order_mark_and_windows_lines_are_no_fault(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD.strip() + b"\r\n" + GOOD.strip() + b"\r\n\r\n")
    assert [example.answer for example in gsm8k_dataset(path=str(tmp_path / "rows.jsonl")).examples] == ["7", "7"]


def test_data_that_looks_like_code_stays_text(configs: Path, tmp_path: Path) -> None:
    """A whole evaluation over it: what is written down is what was read, and nothing else came into being."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(rows(question=text, answer=f"{text} #### 7") for text in HOSTILE))
    assert [example.question for example in gsm8k_dataset(path=str(path)).examples] == [t.strip() for t in HOSTILE]
    task = f"evaluation.greedy.dataset={{_component_: torchtune_grpo.data.gsm8k_dataset, path: {path}}}"
    removed = [f"~evaluation.{name}" for name in ("sampled", "greedy.dataset.split", "greedy.dataset.size")]
    before, out = tree(tmp_path), tmp_path / "out"
    del removed[0]
    done = run_recipe(
        "evaluate",
        configs / "evaluate.yaml",
        task,
        *removed,
        "evaluation.greedy.max_prompt_tokens=100",
        f"output_dir={out}",
        load_weights=True,
    )
    assert done.code == 0, done.err
    assert len((out / "greedy.jsonl").read_text().splitlines()) == len(HOSTILE)
    after = tree(tmp_path)
    assert {name for name in after.keys() - before.keys() if not name.startswith("out")} == set()

import json
import subprocess
import sys
import time

import pytest

from torchtune_grpo.grade import RowError, grade_row, read_rows


def row(completion, gold, prefilled_think=True, **more):
    return {"completion": completion, "gold": gold, "prefilled_think": prefilled_think, **more}


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def grade(path):
    command = [sys.executable, "-m", "torchtune_grpo.grade", str(path)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        ("a</think> <answer>18.0</answer>", "18", (True, True, 1.0)),
        ("a</think> <answer>17</answer>", "18", (True, False, 0.0)),
        ("a</think> <answer>18</answer> bye", "18", (False, True, 0.0)),
        ("18", "18", (False, False, 0.0)),
        ("a</think> <answer>0</answer>", "", (True, False, 0.0)),
        ("a</think> <answer>5</answer>", r"\sqrt 3 & \\ 4 \int", (True, None, 0.0)),
    ],
)
def test_grade_row_pays_format_and_answer_together(completion, gold, expected):
    graded = grade_row(row(completion, gold, note="kept"))
    assert (graded["format"], graded["correct"], graded["reward"]) == expected
    assert graded["note"] == "kept"


def test_grade_prints_one_line_for_each_row(tmp_path):
    good = row("a</think> <answer>18</answer>", "18", id=1)
    opened = row("<think>a</think> <answer>é</answer>", "é", prefilled_think=False)
    result = grade(write(tmp_path / "rows.jsonl", good, "\n", opened))
    assert result.returncode == 0, result.stderr
    graded = [json.loads(line) for line in result.stdout.splitlines()]
    verdict = {"format": True, "correct": True, "reward": 1.0}
    assert graded == [{**good, **verdict}, {**opened, **verdict}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json}\n", ":2: not valid JSON"),
        ("[" * 100_000 + "\n", ":2: not valid JSON"),
        ("[1]\n", ":2: .*list.*expected an object"),
        ({"completion": "", "prefilled_think": True}, ":2: .*'gold'"),
        ({"completion": "", "gold": 18, "prefilled_think": True}, ":2: 'gold' is a int, expected a str"),
        ({"completion": "", "gold": "18", "prefilled_think": 1}, ":2: 'prefilled_think'"),
    ],
)
def test_read_rows_names_the_line_and_the_key(tmp_path, line, message):
    rows = read_rows(write(tmp_path / "rows.jsonl", row("", "1"), line))
    assert next(rows) == row("", "1")
    with pytest.raises(RowError, match=message):
        next(rows)


def test_read_rows_refuses_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"completion": "\xff"}\n')
    with pytest.raises(RowError, match=":1: not valid JSON"):
        next(read_rows(path))


def test_grade_exits_2_and_says_why(tmp_path):
    result = grade(write(tmp_path / "rows.jsonl", row("", "1"), '{"completion": ""}\n'))
    assert result.returncode == 2
    assert len(result.stdout.splitlines()) == 1
    assert "rows.jsonl:2: missing the key 'gold'" in result.stderr
    assert "Traceback" not in result.stderr
    assert grade(tmp_path / "absent.jsonl").returncode == 2


def test_grade_does_not_load_torch():
    script = "import sys, torchtune_grpo.grade; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize(
    "completion",
    ["</think> <answer>" + "9" * 5_000_000 + "</answer>", "<answer>" * 500_000, "</think>" + "{" * 1_000_000]
    + [
        "</think>" + "<answer>1</answer>" * 200_000 + "<answer>",
        "</think> <answer>" + "(" * 999 + "</answer>",
    ],
    ids=["digits", "tags", "braces", "answers", "parentheses"],
)
def test_grade_row_ends_on_huge_completions(completion):
    assert grade_row(row(completion, "9"))["correct"] is False


def test_grade_agrees_with_the_shared_cases(shared_dir):
    disagreements = []
    for line in (shared_dir / "cases" / "reward_cases.jsonl").read_text().splitlines():
        case = json.loads(line)
        start = time.monotonic()
        graded = grade_row({key: case[key] for key in ("completion", "gold", "prefilled_think")})
        seconds = time.monotonic() - start
        for key in ("format", "correct"):
            expected = case[f"expect_{key}"]
            if expected is not None and graded[key] is not expected:
                disagreements.append((case["id"], key, graded[key], round(seconds, 2)))
    assert disagreements == []

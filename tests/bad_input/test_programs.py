"""The programs beside the recipes: grade, plot and the demonstrations."""

import json
from pathlib import Path

import pytest

from tests.bad_input.entry import Outcome, run_program
from torchtune_grpo.demo_opd import Demo

ROW = {"completion": "7 </think> <answer> 7 </answer>", "gold": "7", "prefilled_think": True}
GOOD = json.dumps(ROW).encode() + b"\n"


def last_line(outcome: Outcome) -> str:
    """The one line in which these programs say what is wrong."""
    assert outcome.code != 0 and "Traceback" not in outcome.err, outcome.err
    return outcome.err.strip().splitlines()[-1]


GRADED = {
    "no_json.jsonl": (GOOD + b"{\n", "no_json.jsonl:2: not valid JSON"),
    "list.jsonl": (b"[]\n", "list.jsonl:1: got a JSON list, expected an object"),
    "key.jsonl": (GOOD * 2 + b'{"gold": "7", "prefilled_think": true}\n', "key.jsonl:3: missing the key 'completion'"),
    "type.jsonl": (json.dumps(ROW | {"gold": 7}).encode(), "type.jsonl:1: 'gold' is a int, expected a str"),
    "flag.jsonl": (json.dumps(ROW | {"prefilled_think": 1}).encode(), "'prefilled_think' is a int, expected a bool"),
    "null.jsonl": (json.dumps(ROW | {"completion": None}).encode(), "'completion' is a NoneType"),
    "latin.jsonl": ('{"gold": "ö"}'.encode("latin-1"), "latin.jsonl:1: not valid JSON"),
    "deep.jsonl": (b"[" * 100_000, "deep.jsonl:1: not valid JSON"),
}


@pytest.mark.parametrize("name", GRADED)
def test_grade_names_the_line(tmp_path: Path, name: str) -> None:
    content, expected = GRADED[name]
    (tmp_path / name).write_bytes(content)
    assert expected in last_line(run_program("torchtune_grpo.grade", str(tmp_path / name)))


@pytest.mark.parametrize("arguments", [[], ["absent.jsonl"], ["."], ["a", "b"], ["--wrong"]])
def test_grade_refuses_its_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run_program("torchtune_grpo.grade", *arguments)
    assert "error: " in last_line(outcome) and outcome.code == 2


def test_grade_evaluates_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [
        "__import__('os').system('touch pwned')",
        "$(touch pwned)",
        "{7*7}",
        "${oc.env:HOME}",
        "\ud800",
        "9^{9^{9}}",
    ]
    lines = [json.dumps(ROW | {"completion": f"x </think> <answer> {text} </answer>", "gold": text}) for text in texts]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    done = run_program("torchtune_grpo.grade", "rows.jsonl")
    assert done.code == 0, done.err
    assert [json.loads(line)["gold"] for line in done.out.splitlines()] == texts
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


PLOTTED = {
    "list": (b"[1]\n", "metrics.jsonl, row 1: got a JSON list"),
    "no_step": (b'{"loss": 1.0}\n', "metrics.jsonl, row 1: ", "step"),
    "text": (b'{"step": 1, "time_s": 1.0, "success": "high"}\n', "metrics.jsonl, row 1: ", "success"),
    "binary": (b"\xff\xfe\n", "metrics.jsonl: not UTF-8"),
}


@pytest.mark.parametrize("name", PLOTTED)
def test_plot_names_the_line(tmp_path: Path, name: str) -> None:
    content, *expected = PLOTTED[name]
    (tmp_path / "metrics.jsonl").write_bytes(content + b'{"step": 2, "time_s": 2.0, "reward": 1.0}\n')
    line = last_line(run_program("torchtune_grpo.plot", str(tmp_path)))
    assert all(text in line for text in expected)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "RUN_DIR"),
        (["absent"], "expected a run's output_dir with a metrics.jsonl in it"),
        (["."], "expected a run's output_dir with a metrics.jsonl in it"),
        (["run", "--out", "file/curve.png"], "file"),
        (["run", "--out", "curve.nothing"], "nothing"),
    ],
)
def test_plot_refuses_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "time_s": 1.0, "reward": 0.5}\n')
    assert expected in last_line(run_program("torchtune_grpo.plot", *arguments))


@pytest.mark.parametrize("module", ["demo", "demo_opd"])
@pytest.mark.parametrize("arguments", [["--seed", "one"], ["--wrong"], ["--output-dir"], ["--output-dir", "file"]])
def test_demonstration_refuses_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    line = last_line(run_program(f"torchtune_grpo.{module}", *arguments))
    assert arguments[-1] in line and "error: " in line


def test_demo_refuses_a_number_of_ranks_below_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--ranks" in last_line(run_program("torchtune_grpo.demo", "--ranks", "0"))


def test_demo_refuses_another_folder_than_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "the repository's root" in last_line(run_program("torchtune_grpo.demo"))


def test_distillation_demo_refuses_the_folder_of_another_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtune_grpo.demo_opd.launch", lambda *arguments: 0.0)
    monkeypatch.chdir(Path(__file__).parents[2])
    Demo(tmp_path, seed=0).stage("student", "sft_warmup_distributed", "sft_warmup", {})
    Demo(tmp_path, seed=0).stage("student", "sft_warmup_distributed", "sft_warmup", {})
    with pytest.raises(SystemExit, match="--output-dir: got .*configs/student.yaml differs"):
        Demo(tmp_path, seed=1).stage("student", "sft_warmup_distributed", "sft_warmup", {})

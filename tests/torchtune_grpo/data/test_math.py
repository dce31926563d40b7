import json

import pytest

from torchtune_grpo.config import ConfigError
from torchtune_grpo.data import math_dataset
from torchtune_grpo.data.math import SUBJECTS, last_boxed


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"So $x = \boxed{12}$.", "12"),
        (r"First \boxed{3}, then \boxed{4}.", "4"),
        (r"$\boxed{\frac{1}{\sqrt{2}}}$ and {more}", r"\frac{1}{\sqrt{2}}"),
        (r"$\boxed{\left\{ 1, 2 \right.}$ }", r"\left\{ 1, 2 \right."),
        (r"$\boxed{a\\}b}$", r"a\\"),
        (r"$\boxed 7$ units, costing \$3", "7"),
        (r"\[\boxed 7\] units", "7"),
        (r"the answer is \boxed 7.", "7"),
        (r"$\fbox{5}$", "5"),
        (r"$\boxed{2}$ or rather $\fbox{3}$", "3"),
        (r"$\boxed {8}$", "8"),
        (r"$\boxed{}$", ""),
        (r"$\boxed{ }$", ""),
        (r"$\boxed{1$", None),
        (r"$\boxedsize{1}$", None),
        ("no box", None),
    ],
)
def test_last_boxed(solution, answer):
    assert last_boxed(solution) == answer


def test_last_boxed_takes_linear_time_on_deep_nesting():
    assert last_boxed(r"\boxed{" + "{" * 100_000 + "1" + "}" * 100_000 + "}").count("{") == 100_000


HENDRYCKS = [
    {"problem": "P0", "level": "Level 1", "type": "Algebra", "solution": r"So $\boxed{\frac12}$."},
    {"problem": "P1", "level": "Level 5", "type": "Counting & Probability", "solution": r"$\boxed{}$"},
    {"problem": "P2", "level": "Level 5", "type": "Counting & Probability", "solution": r"$\boxed 6$"},
    {"problem": "P3", "level": "Level ?", "type": "Geometry", "solution": "No box."},
    {"problem": "P4", "level": "Level 2", "type": "Algebra", "solution": r"$\boxed{2}$, no, $\boxed{3}$"},
]
MATH_500 = [
    {"problem": "M0", "solution": r"$\boxed{1}$", "answer": "1", "subject": "Precalculus", "level": 2},
    {"problem": "M1", "solution": r"$\boxed{wrong}$", "answer": "9", "subject": "Algebra", "level": 4},
]


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def write(rows):
        file = tmp_path / "math.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        return str(file)

    return write


def answers(dataset):
    return {example.question: example.answer for example in dataset.examples}


def test_math_dataset_takes_the_last_box_and_counts_rows_without_gold(written):
    dataset = math_dataset(path=written(HENDRYCKS))
    assert answers(dataset) == {"P0": r"\frac12", "P2": "6", "P4": "3"}
    assert dataset.dropped == {"answer_empty": 1, "answer_missing": 1}
    assert dataset.examples[0].solution == r" So $\boxed{\frac12}$. </think> <answer> \frac12 </answer>"
    assert dataset.examples[0].source == "math"


def test_math_dataset_prefers_the_answer_column(written):
    assert answers(math_dataset(path=written(MATH_500))) == {"M0": "1", "M1": "9"}


def test_math_dataset_chooses_subjects_and_levels(written):
    path = written(HENDRYCKS)
    assert set(answers(math_dataset(path=path, subjects=["counting_and_probability"]))) == {"P2"}
    assert set(answers(math_dataset(path=path, levels=[1, 2]))) == {"P0", "P4"}
    assert set(answers(math_dataset(path=path, subjects=["algebra"], levels=[2]))) == {"P4"}
    path = written(MATH_500)
    assert set(answers(math_dataset(path=path, subjects=["precalculus"], levels=[2, 3]))) == {"M0"}


def test_math_dataset_partitions_before_it_chooses(written):
    path = written(HENDRYCKS)
    assert set(answers(math_dataset(path=path, partition="0-0/2", levels=[2, 5]))) == {"P2", "P4"}
    assert set(answers(math_dataset(path=path, partition="1-1/2", levels=[2, 5]))) == set()


def test_math_dataset_reads_every_subject_of_the_hub(monkeypatch):
    asked = []

    def load_dataset(path, name, split):
        asked.append((path, name, split))
        return [{"problem": name, "solution": r"\boxed{1}", "level": "Level 1", "type": "Algebra"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    dataset = math_dataset(split="test")
    assert asked == [("EleutherAI/hendrycks_math", subject, "test") for subject in SUBJECTS]
    assert [example.question for example in dataset.examples] == list(SUBJECTS)
    asked.clear()
    math_dataset(path="HuggingFaceH4/MATH-500", split="test")
    assert asked == [("HuggingFaceH4/MATH-500", None, "test")]


def test_math_dataset_names_path_where_the_hub_fails(monkeypatch):
    def load_dataset(path, name, split):
        raise ConnectionError("offline")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(ConfigError, match="`path`.*`split`.*offline"):
        math_dataset()


@pytest.mark.parametrize(("key", "value"), [("subjects", ["algebra", "topology"]), ("levels", [0, 6])])
def test_math_dataset_refuses_unknown_subjects_and_levels(key, value):
    with pytest.raises(ConfigError, match=f"`{key}`"):
        math_dataset(**{key: value})

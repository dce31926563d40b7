"""Which teacher a row belongs to, and what a resumed run may and may not change about it."""

from pathlib import Path

import pytest
import torch

from torchtune_grpo.config import ConfigError
from torchtune_grpo.distillation.routing import (
    Routing,
    TeacherIndex,
    check_resumed_teachers,
    index_teachers,
    rows_by_teacher,
)

A, B, C = Path("/models/a"), Path("/models/b"), Path("/models/c")
BOTH = Routing(sources={"x": "first", "y": "second"})


def _index(folders: dict[str, Path], routing: Routing | None = BOTH, sources: tuple[str, ...] = ("x", "y")):
    return index_teachers(folders, routing, sources)


def test_numbers_do_not_depend_on_the_order_of_the_yaml() -> None:
    index = _index({"first": B, "second": A})
    assert index.checkpoints == ("/models/a", "/models/b") and index.names == ("second", "first")
    assert index.column(["x", "y", "x"]).tolist() == [1, 0, 1]
    shuffled = _index({"second": A, "first": B}, Routing(sources={"y": "second", "x": "first"}), ("y", "x"))
    assert shuffled == index


def test_aliases_of_one_checkpoint_share_a_teacher(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    index = _index({"second": tmp_path / "link", "first": tmp_path / "real" / ".." / "real"})
    assert index.checkpoints == (str(tmp_path / "real"),) and index.names == ("first+second",)
    assert index.column(["y", "x"]).tolist() == [0, 0]


def test_default_teacher_takes_the_sources_that_are_not_listed() -> None:
    index = _index({"first": A, "second": B}, Routing(sources={"x": "first"}, default="second"), ("x", "y", "z"))
    assert index.column(["z", "x", "y"]).tolist() == [1, 0, 1]


def test_one_teacher_needs_no_routing_and_rows_are_then_untagged() -> None:
    index = _index({"first": A}, None)
    assert index.column(["x", "anything"]) is None
    assert index.state() == {"tagged": False, "checkpoints": ["/models/a"]}


@pytest.mark.parametrize(
    ("folders", "routing", "sources", "message"),
    [
        ({}, BOTH, ("x",), "^teachers: got none"),
        ({"first": A, "second": B}, None, ("x",), "^routing: got null.* 2 teachers"),
        ({"first": A, "second": B}, Routing(sources={"x": "frist"}), ("x",), "routing.sources.x: .*'frist'.*'first'"),
        ({"first": A}, Routing(default="other"), ("x",), "routing.default: got 'other'"),
        ({"first": A, "second": B}, BOTH, ("x", "y", "z"), r"routing.sources: .*\['z'\].* no teacher"),
        ({"first": A, "second": B}, BOTH, ("x",), r"routing.sources: got \['y'\], which no training row has"),
        ({"first": A, "second": B}, Routing(default="first"), ("x",), r"lead.* \['second'\]"),
    ],
)
def test_contradictions_are_refused(
    folders: dict[str, Path], routing: Routing | None, sources: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        index_teachers(folders, routing, sources)


def test_a_source_that_set_up_has_not_seen_is_an_error() -> None:
    with pytest.raises(KeyError, match="z"):
        _index({"first": A, "second": B}).column(["z"])


def _state(*checkpoints: Path, tagged: bool = True) -> dict[str, object]:
    sources = {str(i): i for i in range(len(checkpoints))} if tagged else None
    names = tuple("abc"[: len(checkpoints)])
    return TeacherIndex(checkpoints=tuple(map(str, checkpoints)), names=names, number_of_source=sources).state()


@pytest.mark.parametrize("state", [_state(A, B), _state(A), _state(A, tagged=False)])
def test_resume_with_the_same_teachers_goes_on(state: dict[str, object]) -> None:
    check_resumed_teachers(state, dict(state), Path("step"))


def test_resume_may_add_a_teacher_behind_the_others() -> None:
    check_resumed_teachers(_state(A, B), _state(A, B, C), Path("step"))


@pytest.mark.parametrize(
    ("saved", "current", "problem"),
    [
        (_state(A, C), _state(A, B, C), r"\['/models/c'\] renumbered"),
        (_state(A, B), _state(A), r"\['/models/b'\] dropped or replaced"),
        (_state(A, B), _state(A, C), r"\['/models/b'\] dropped or replaced"),
        (_state(A, tagged=False), _state(B, tagged=False), r"\['/models/a'\] dropped or replaced"),
        (_state(A), _state(A, tagged=False), "rows were tagged with their teacher and are not tagged"),
        (_state(A, tagged=False), _state(A), "rows were not tagged and are tagged with their teacher"),
    ],
)
def test_resume_with_other_teachers_is_refused_with_both_lists(
    saved: dict[str, list], current: dict[str, list], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        check_resumed_teachers(saved, current, Path("step_7"))
    before, after = str(error.value).split("config names")
    assert "step_7" in before
    assert all(f"{i}: {path}\n" in before for i, path in enumerate(saved["checkpoints"]))
    assert all(f"{i}: {path}\n" in after for i, path in enumerate(current["checkpoints"]))


def test_resume_from_a_checkpoint_without_teachers_is_refused() -> None:
    with pytest.raises(ConfigError, match="without teachers"):
        check_resumed_teachers(None, _state(A), Path("step"))


def test_rows_by_teacher_obeys_the_column_also_with_one_teacher() -> None:
    rows = rows_by_teacher(torch.tensor([2, 0, 2, 0]), 4, 3)
    assert [part.tolist() for part in rows] == [[1, 3], [], [0, 2]]
    assert [part.tolist() for part in rows_by_teacher(torch.tensor([0, 0]), 2, 1)] == [[0, 1]]
    assert [part.tolist() for part in rows_by_teacher(None, 3, 1)] == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("column", "teachers", "message"),
    [
        (None, 2, "no teacher index"),
        (torch.tensor([0, 1]), 2, r"shape \(2,\).* 3 rows"),
        (torch.tensor([[0], [0], [0]]), 1, r"shape \(3, 1\)"),
        (torch.tensor([0, 1, 1]), 1, r"indices \[1\]"),
        (torch.tensor([0, -1, 0]), 2, r"indices \[-1\]"),
    ],
)
def test_rows_by_teacher_refuses_what_it_would_have_to_guess(
    column: torch.Tensor | None, teachers: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rows_by_teacher(column, 3, teachers)

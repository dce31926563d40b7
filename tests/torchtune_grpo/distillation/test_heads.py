"""LM heads of the teachers: the slice asked for, read as often as the lifecycle says."""

from pathlib import Path

import pytest
import torch

from tests.torchtune_grpo.distillation.small_models import VOCAB, two_teachers
from torchtune_grpo.config import ConfigError
from torchtune_grpo.distillation import heads
from torchtune_grpo.distillation.heads import TeacherHeads


def _heads(folder: Path, lifecycle: str = "keep", **changes: object) -> TeacherHeads:
    settings = {"widths": [16, 24], "dtype": torch.float32, "start": 7, "stop": 40} | changes
    return TeacherHeads(
        [str(folder / "0"), str(folder / "1")], device=torch.device("cpu"), lifecycle=lifecycle, **settings
    )


@pytest.mark.parametrize("lifecycle", ["keep", "offload", "evict"])
def test_weight_is_the_slice_of_that_teacher_before_and_after_a_release(lifecycle: str, tmp_path: Path) -> None:
    models = two_teachers(tmp_path)
    teacher_heads = _heads(tmp_path, lifecycle)
    for _ in range(2):
        for number in (1, 0):
            weight = teacher_heads.weight(number)
            assert torch.equal(weight, models[number].tok_embeddings.weight[7:40]) and not weight.requires_grad
        teacher_heads.release()


def test_heads_have_the_payloads_dtype(tmp_path: Path) -> None:
    two_teachers(tmp_path)
    assert _heads(tmp_path, dtype=torch.bfloat16).weight(0).dtype == torch.bfloat16


@pytest.mark.parametrize(("lifecycle", "reads"), [("keep", [0, 0]), ("offload", [0, 0]), ("evict", [2, 1])])
def test_a_release_costs_each_used_teacher_one_reading_at_most(
    lifecycle: str, reads: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_teachers(tmp_path)
    teacher_heads, seen = _heads(tmp_path, lifecycle), []
    read = heads.read_lm_head
    monkeypatch.setattr(heads, "read_lm_head", lambda *args: seen.append(args) or read(*args))
    for used, expected in zip([(0, 1, 0, 1), (1, 1)], reads, strict=True):
        seen.clear()
        for number in used:
            teacher_heads.weight(number)
        assert len(seen) == expected
        teacher_heads.release()


@pytest.mark.parametrize(("lifecycle", "held"), [("keep", 2), ("offload", 0), ("evict", 0)])
def test_a_release_frees_the_device_unless_heads_are_kept(lifecycle: str, held: int, tmp_path: Path) -> None:
    two_teachers(tmp_path)
    teacher_heads = _heads(tmp_path, lifecycle)
    assert len(teacher_heads._on_device) == held
    teacher_heads.weight(0)
    teacher_heads.release()
    assert len(teacher_heads._on_device) == held


@pytest.mark.parametrize("changes", [{"widths": [16, 16]}, {"stop": VOCAB + 1}])
def test_a_head_that_does_not_fit_the_payload_is_refused_at_load(changes: dict[str, object], tmp_path: Path) -> None:
    two_teachers(tmp_path)
    with pytest.raises(ConfigError, match="LM head of shape .*expected"):
        _heads(tmp_path, **changes)

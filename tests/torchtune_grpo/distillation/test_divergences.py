from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.torchtune_grpo.distillation.dense import DIVERGENCES, dense, entropy, normal
from torchtune_grpo.distillation import (
    ReverseKL,
    divergence_from_hidden,
    divergence_from_logits,
    divergence_fused,
)

ROWS, VOCABULARY, WIDTH, TEACHER_WIDTH = 7, 11, 5, 3
WEIGHTS = torch.tensor([0.3, 0.1, 0.0, 0.7, 0.2, 0.5, 0.4], dtype=torch.float64)
FORMS = ("logits", "hidden", "fused")


def _models(dtype: torch.dtype = torch.float64, rows: int = ROWS) -> dict[str, Tensor]:
    """Two models that differ, with the student's tensors as leaves."""
    tensors = {
        "student_hidden": normal(rows, WIDTH, seed=0),
        "student_weight": normal(VOCABULARY, WIDTH, seed=1),
        "teacher_hidden": normal(rows, TEACHER_WIDTH, seed=2),
        "teacher_weight": normal(VOCABULARY, TEACHER_WIDTH, seed=3, scale=2.0),
    }
    return {name: tensor.to(dtype).requires_grad_("student" in name) for name, tensor in tensors.items()}


def _logits(models: dict[str, Tensor], side: str) -> Tensor:
    return models[f"{side}_hidden"] @ models[f"{side}_weight"].T


def _call(form: str, divergence, models: dict[str, Tensor], weights: Tensor, **options):
    """The entry point of ``form``; autograd projects the student where the form is given its logits."""
    teacher = (models["teacher_hidden"], models["teacher_weight"])
    if form == "fused":
        student = (models["student_hidden"], models["student_weight"])
        return divergence_fused(divergence, *student, *teacher, weights, **options)
    if form == "hidden":
        return divergence_from_hidden(divergence, _logits(models, "student"), *teacher, weights, **options)
    logits = _logits(models, "teacher")
    return divergence_from_logits(divergence, _logits(models, "student"), logits, weights, **options)


def _gradients(total: Tensor, models: dict[str, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(total, [models["student_hidden"], models["student_weight"]]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_divergence_equals_a_dense_float64_reference(form: str, name: str, temperature: float) -> None:
    models = _models()
    logits = _logits(models, "student"), _logits(models, "teacher")
    values = dense(name, *logits, temperature)
    expected = (WEIGHTS * values).sum()
    total, statistics = _call(form, DIVERGENCES[name], models, WEIGHTS, temperature=temperature, chunk_size=3)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(statistics.divergence, values.detach())
    torch.testing.assert_close(statistics.reverse_kl, dense("reverse_kl", *logits, temperature).detach())
    torch.testing.assert_close(statistics.student_entropy, entropy(logits[0], temperature).detach())
    torch.testing.assert_close(_gradients(total, models), _gradients(expected, models))


class _Rerun(torch.autograd.Function):
    """``fn`` anew for every backward pass: gradcheck makes several through one graph, ``fn`` allows one."""

    @staticmethod
    def forward(ctx, fn: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.fn = fn
        ctx.save_for_backward(*inputs)
        return fn(*inputs)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            return None, *torch.autograd.grad(ctx.fn(*leaves), leaves, gradient)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergence_gradient_equals_finite_differences(form: str, name: str) -> None:
    models = _models(rows=3)
    students = [models["student_hidden"], models["student_weight"]]

    def total(hidden: Tensor, weight: Tensor) -> Tensor:
        changed = models | {"student_hidden": hidden, "student_weight": weight}
        return _call(form, DIVERGENCES[name], changed, WEIGHTS[:3], temperature=1.3, chunk_size=2)[0]

    assert torch.autograd.gradcheck(partial(_Rerun.apply, total), students)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk_size", [1, 2, 7, 100, None])
def test_divergence_does_not_depend_on_chunk_size(form: str, chunk_size: int | None) -> None:
    models = _models()
    expected, expected_statistics = _call(form, ReverseKL(), models, WEIGHTS, chunk_size=4)
    actual, statistics = _call(form, ReverseKL(), models, WEIGHTS, chunk_size=chunk_size)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(vars(statistics), vars(expected_statistics))
    torch.testing.assert_close(_gradients(actual, models), _gradients(expected, models))


def test_divergence_does_not_depend_on_tiles_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    models = _models()
    expected = _gradients(_call("fused", ReverseKL(), models, WEIGHTS)[0], models)
    monkeypatch.setattr("torchtune_grpo.distillation.chunked._CPU_TILE_ELEMENTS", 4 * ROWS)
    monkeypatch.setattr("torchtune_grpo.distillation.chunked._BLOCK", 3)
    monkeypatch.setattr("torchtune_grpo.distillation.chunked._PARTIAL_SUMS", 2)
    actual = _gradients(_call("fused", ReverseKL(), models, WEIGHTS)[0], models)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [0, 1])
def test_divergence_of_no_row_and_of_one(form: str, rows: int) -> None:
    models, weights = _models(rows=rows), WEIGHTS[:rows]
    expected = (weights * dense("reverse_kl", _logits(models, "student"), _logits(models, "teacher"))).sum()
    total, statistics = _call(form, ReverseKL(), models, weights)
    torch.testing.assert_close(total, expected)
    assert statistics.divergence.shape == (rows,)
    torch.testing.assert_close(_gradients(total, models), _gradients(expected, models))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergence_in_bf16_rounds_logits_and_gradients_only(form: str, name: str) -> None:
    """Values differ from the reference by the order of fp32 sums: it starts from the same rounded logits. A gradient is
    rounded twice, as logits and as the result, by 2^-9 each, here and in the reference: 2^-7 of its norm at most."""
    models = _models(torch.bfloat16)
    expected = (WEIGHTS * dense(name, _logits(models, "student"), _logits(models, "teacher"))).sum()
    total, statistics = _call(form, DIVERGENCES[name], models, WEIGHTS.float(), chunk_size=3)
    assert total.dtype == statistics.divergence.dtype == torch.float32
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)
    for actual, wanted in zip(_gradients(total, models), _gradients(expected, models), strict=True):
        assert actual.dtype == torch.bfloat16
        error = (actual.double() - wanted.double()).norm() / wanted.double().norm()
        assert error <= 2**-7


def test_divergence_from_bf16_logits_is_as_exact_as_from_fp32() -> None:
    student, teacher = (normal(4, 300, seed=seed, scale=3).bfloat16() for seed in (0, 1))
    _, statistics = divergence_from_logits(ReverseKL(), student, teacher, torch.ones(4))
    torch.testing.assert_close(statistics.divergence.double(), dense("reverse_kl", student, teacher), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergence_of_logits_far_from_zero_is_finite(name: str) -> None:
    """e^10000 overflows: student and teacher must each be shifted by their own maximum."""
    student = torch.tensor([[1e4, 1e4, 9950.0]], requires_grad=True)
    teacher = torch.tensor([[-1e4, -9999.0, -10_050.0]])
    total, _ = divergence_from_logits(DIVERGENCES[name], student, teacher, torch.ones(1))
    total.backward()
    torch.testing.assert_close(total.double(), dense(name, student, teacher)[0], rtol=1e-5, atol=1e-6)
    assert student.grad.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_divergence_changes_when_the_teacher_does(form: str) -> None:
    models = _models()
    other = models | {"teacher_hidden": normal(ROWS, TEACHER_WIDTH, seed=9)}
    first, second = (_call(form, ReverseKL(), each, WEIGHTS)[0] for each in (models, other))
    assert abs(first - second) > 0.1


@pytest.mark.parametrize("form", FORMS)
def test_divergence_gradient_is_multiplied_by_what_follows(form: str) -> None:
    models = _models()
    expected = _gradients(_call(form, ReverseKL(), models, WEIGHTS)[0], models)
    actual = _gradients(-3 * _call(form, ReverseKL(), models, WEIGHTS)[0], models)
    torch.testing.assert_close(actual, [-3 * gradient for gradient in expected])


def test_divergence_refuses_a_second_backward_pass() -> None:
    total, _ = _call("fused", ReverseKL(), models := _models(), WEIGHTS)
    torch.autograd.grad(total, models["student_hidden"], retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, models["student_hidden"])


@pytest.mark.parametrize("form", FORMS)
def test_divergence_statistics_carry_no_gradient(form: str) -> None:
    _, statistics = _call(form, ReverseKL(), _models(), WEIGHTS)
    assert not any(value.requires_grad for value in vars(statistics).values())


@pytest.mark.parametrize("form", FORMS)
def test_divergence_without_grad_mode_is_only_a_value(form: str) -> None:
    models = _models()
    with torch.no_grad():
        total, _ = _call(form, ReverseKL(), models, WEIGHTS)
    assert not total.requires_grad
    torch.testing.assert_close(total, _call(form, ReverseKL(), models, WEIGHTS)[0].detach())


@pytest.mark.parametrize("frozen", ["student_hidden", "student_weight"])
def test_divergence_fused_of_a_frozen_part_trains_the_other(frozen: str) -> None:
    models = _models()
    hidden, weight = _gradients(_call("fused", ReverseKL(), models, WEIGHTS)[0], models)
    expected = weight if frozen == "student_hidden" else hidden
    models[frozen] = models[frozen].detach()
    (leaf,) = [tensor for tensor in models.values() if tensor.requires_grad]
    _call("fused", ReverseKL(), models, WEIGHTS)[0].backward()
    torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize(
    ("form", "name"),
    [("hidden", "teacher_hidden"), ("hidden", "teacher_weight"), ("fused", "teacher_weight")],
)
def test_divergence_refuses_a_teacher_that_requires_grad(form: str, name: str) -> None:
    models = _models()
    models[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} requires grad"):
        _call(form, ReverseKL(), models, WEIGHTS)


def test_divergence_refuses_teacher_logits_that_require_grad() -> None:
    logits = normal(ROWS, VOCABULARY, seed=0).requires_grad_()
    with pytest.raises(ValueError, match="teacher_logits requires grad"):
        divergence_from_logits(ReverseKL(), logits, logits, WEIGHTS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 0}, "chunk_size: got 0"),
        ({"chunk_size": -2}, "chunk_size: got -2"),
        ({"temperature": 0.0}, "temperature: got 0.0"),
    ],
)
def test_divergence_refuses_numbers_out_of_range(form: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call(form, ReverseKL(), _models(), WEIGHTS, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_weight": normal(12, TEACHER_WIDTH, seed=0)}, "vocabulary of .*student.* and .*: got 11 and 12"),
        ({"teacher_hidden": normal(6, TEACHER_WIDTH, seed=0)}, r"rows of .*: got 7, 6 and \[7\]"),
        ({"weights": WEIGHTS[:6]}, r"rows of .*: got 7, 7 and \[6\]"),
        ({"weights": WEIGHTS[:, None]}, r"rows of .*: got 7, 7 and \[7, 1\]"),
    ],
)
def test_divergence_refuses_sides_that_do_not_fit(form: str, changes: dict, message: str) -> None:
    models = _models() | changes
    with pytest.raises(ValueError, match=message):
        _call(form, ReverseKL(), models, models.get("weights", WEIGHTS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_hidden": normal(ROWS, 4, seed=0)}, "teacher_hidden has hidden size 4 .* teacher_weight has 3"),
        ({"student_hidden": normal(ROWS, 4, seed=0)}, "student_hidden has hidden size 4 .* student_weight has 5"),
        ({"teacher_hidden": normal(ROWS, 3, seed=0).float()}, "torch.float32, teacher_weight has 3 in torch.float64"),
        ({"student_hidden": normal(ROWS, 5, seed=0).half()}, "student_hidden: got torch.float16"),
        ({"student_hidden": normal(1, ROWS, 5, seed=0)}, r"student_hidden: got .* of shape \[1, 7, 5\]"),
        (
            {"student_weight": normal(0, WIDTH, seed=0), "teacher_weight": normal(0, TEACHER_WIDTH, seed=0)},
            "vocabulary of .*: got 0 and 0",
        ),
    ],
)
def test_divergence_fused_refuses_tensors_that_do_not_fit(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call("fused", ReverseKL(), _models() | changes, WEIGHTS)

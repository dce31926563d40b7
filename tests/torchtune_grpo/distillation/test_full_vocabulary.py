"""The full-vocabulary objective on a student and two different teachers, against dense distributions in float64."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.torchtune_grpo.distillation.small_models import (
    ROW_TEACHERS,
    VOCAB,
    make_distillation,
    make_rows,
    make_side,
    make_small,
    response_logits,
    save_small,
    two_teachers,
)
from torchtune_grpo.config import ConfigError
from torchtune_grpo.distillation import JSD, CrossEntropy, ForwardKL, FullVocabulary, HiddenStates, Logits, ReverseKL
from torchtune_grpo.distillation import projection as projection_module
from torchtune_grpo.distillation.payloads import DistillationTrajectory
from torchtune_grpo.logprobs import DenseLogprobs
from torchtune_grpo.types import Rollout

FORMS = {
    "logits": FullVocabulary(payload=Logits(dtype="fp32"), fused=False),
    "hidden": FullVocabulary(payload=HiddenStates(dtype="fp32"), fused=False, chunk_size=3),
    "fused": FullVocabulary(payload=HiddenStates(dtype="fp32"), chunk_size=3),
}
WIDTHS = (16, 24)


def _kind(form: str) -> str:
    return "logits" if form == "logits" else "hidden"


def _exact(student: Tensor, teacher: Tensor, divergence: object) -> Tensor:
    """Per token, from logits ``[t, V]``, by the textbook."""
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    s, t = log_s.exp(), log_t.exp()
    if isinstance(divergence, ForwardKL):
        return (t * (log_t - log_s)).sum(-1)
    if isinstance(divergence, CrossEntropy):
        return -(s * log_t).sum(-1)
    return (s * (log_s - log_t)).sum(-1)


def _reference(
    student: nn.Module, teachers: list[nn.Module], rollout: Rollout, divergence: object, temperature: float = 1.0
) -> Tensor:
    """``[N, R]`` in float64, every row by itself with its own teacher."""
    out = torch.zeros(rollout.response_mask.shape, dtype=torch.float64)
    for row, number in enumerate(ROW_TEACHERS):
        logits = [response_logits(m, rollout, row)[:, :VOCAB] / temperature for m in (student, teachers[number])]
        out[row, : len(logits[0])] = _exact(*logits, divergence)
    return out


def _loss(form: str, folder: Path, trajectory: DistillationTrajectory, student: nn.Module, **changes: object) -> Tensor:
    objective = replace(FORMS[form], **changes)
    side = make_side(folder, WIDTHS, kind=_kind(form))
    return objective(student, trajectory, DenseLogprobs(), side).loss


def _uneven_weights(rollout: Rollout) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(rollout.response_mask.shape, generator=generator) * rollout.response_mask


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("divergence", [ReverseKL(), ForwardKL(), CrossEntropy()])
def test_loss_is_the_weighted_sum_of_each_rows_divergence_to_its_teacher(
    form: str, divergence: object, tmp_path: Path
) -> None:
    student, teachers, rollout = make_small(0), two_teachers(tmp_path), make_rows()
    weights = _uneven_weights(rollout)
    trajectory = make_distillation(rollout, teachers, kind=_kind(form), weights=weights)
    loss = _loss(form, tmp_path, trajectory, student, divergence=divergence)
    expected = (weights.double() * _reference(student, teachers, rollout, divergence)).sum()
    assert expected > 0.5
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_temperature_divides_the_logits_of_student_and_teacher(form: str, tmp_path: Path) -> None:
    student, teachers, rollout = make_small(0), two_teachers(tmp_path), make_rows()
    trajectory = make_distillation(rollout, teachers, kind=_kind(form))
    side = make_side(tmp_path, WIDTHS, kind=_kind(form))
    loss = FORMS[form](student, trajectory, DenseLogprobs(temperature=0.7), side).loss
    expected = _reference(student, teachers, rollout, ReverseKL(), temperature=0.7).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


def _plain_gradients(student: nn.Module, teachers: list[nn.Module], rollout: Rollout, weights: Tensor) -> list[Tensor]:
    """By torchtune's own forward of each row and autograd through a plain reverse KL."""
    total = torch.zeros(())
    for row, number in enumerate(ROW_TEACHERS):
        prompt, length = int(rollout.prompt_lengths[row]), int(rollout.response_lengths[row])
        start = rollout.prompt_width - prompt
        logits = student(rollout.tokens[None, row, start : start + prompt + length])[0, prompt - 1 : -1]
        teacher = response_logits(teachers[number], rollout, row).float()
        total = total + (weights[row, :length] * _exact(logits, teacher, ReverseKL())).sum()
    return list(torch.autograd.grad(total, list(student.parameters())))


@pytest.mark.parametrize("form", FORMS)
def test_gradient_is_that_of_plain_autograd_in_every_form(form: str, tmp_path: Path) -> None:
    student, teachers, rollout = make_small(0), two_teachers(tmp_path), make_rows()
    weights = _uneven_weights(rollout)
    trajectory = make_distillation(rollout, teachers, kind=_kind(form), weights=weights)
    loss = _loss(form, tmp_path, trajectory, student)
    gradients = torch.autograd.grad(loss, list(student.parameters()))
    expected = _plain_gradients(student, teachers, rollout, weights)
    torch.testing.assert_close(list(gradients), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", ["hidden", "fused"])
def test_swapped_teachers_change_the_loss(form: str, tmp_path: Path) -> None:
    teachers = [make_small(1), make_small(2)]  # of one size, so that only the routing tells them apart
    for i, model in enumerate(teachers):
        save_small(tmp_path / str(i), model)
    side, rollout = make_side(tmp_path, (16, 16)), make_rows()
    right = make_distillation(rollout, teachers)
    swapped = replace(right, teacher_index=1 - right.teacher_index)
    losses = [FORMS[form](make_small(0), part, DenseLogprobs(), side).loss for part in (right, swapped)]
    assert abs(losses[0] - losses[1]) > 0.1


@pytest.mark.parametrize("form", FORMS)
def test_order_of_rows_makes_no_difference(form: str, tmp_path: Path) -> None:
    trajectory = make_distillation(make_rows(), two_teachers(tmp_path), kind=_kind(form))
    shuffled = trajectory.rows(torch.tensor([2, 1, 3, 0]))
    assert shuffled.teacher_index.tolist() == [1, 0, 1, 1]
    losses = [_loss(form, tmp_path, part, make_small(0)) for part in (trajectory, shuffled)]
    torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.parametrize("form", FORMS)
def test_padding_of_either_vocabulary_takes_no_part(form: str, tmp_path: Path) -> None:
    student, teachers, rollout = make_small(0, vocab_size=64), two_teachers(tmp_path), make_rows()
    teachers[1] = make_small(2, vocab_size=70, num_layers=2, embed_dim=24)
    save_small(tmp_path / "1", teachers[1])
    trajectory = make_distillation(rollout, teachers, kind=_kind(form))
    if form == "logits":
        trajectory = replace(trajectory, payload=[part[:, :VOCAB] for part in trajectory.payload])
    loss = _loss(form, tmp_path, trajectory, student)
    torch.testing.assert_close(
        loss.double(), _reference(student, teachers, rollout, ReverseKL()).sum(), rtol=1e-5, atol=0
    )
    loss.backward()
    gradient = student.tok_embeddings.weight.grad
    assert gradient[:VOCAB].any() and not gradient[VOCAB:].any()


def test_heads_project_only_the_tokens_of_their_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple] = []
    fused = projection_module.divergence_fused

    def spy(divergence: object, *tensors: Tensor, **options: object):
        seen.append(tuple(tuple(tensor.shape) for tensor in tensors))
        return fused(divergence, *tensors, **options)

    monkeypatch.setattr(projection_module, "divergence_fused", spy)
    trajectory = make_distillation(make_rows(), two_teachers(tmp_path))
    _loss("fused", tmp_path, trajectory, make_small(0))
    only_first = trajectory.rows(torch.tensor([1]))
    _loss("fused", tmp_path, only_first, make_small(0))
    # Student's states and head, teacher's states and head, weights: row 1, one token, is teacher 0's.
    one = ((1, 16), (VOCAB, 16), (1, 16), (VOCAB, 16), (1,))
    assert seen == [one, ((10, 16), (VOCAB, 16), (10, 24), (VOCAB, 24), (10,)), one]


def _bad_payloads(trajectory: DistillationTrajectory) -> dict[str, DistillationTrajectory]:
    first, *rest = trajectory.payload
    return {
        "length": replace(trajectory, payload=[first[:-1], *rest]),
        "width": replace(trajectory, payload=[first[:, :-1], *rest]),
        "dtype": replace(trajectory, payload=[first.bfloat16(), *rest]),
    }


@pytest.mark.parametrize("fault", ["length", "width", "dtype"])
def test_a_payload_that_is_not_its_rows_is_refused_before_any_projection(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection_module, "divergence_fused", lambda *args, **options: pytest.fail("projected"))
    trajectory = _bad_payloads(make_distillation(make_rows(), two_teachers(tmp_path)))[fault]
    with pytest.raises(ValueError, match="row 0: got a payload .* from the teacher 't1'"):
        _loss("fused", tmp_path, trajectory, make_small(0))


@pytest.mark.parametrize(
    ("column", "message"),
    [(None, "no teacher index"), (torch.tensor([1, 0]), "4 rows"), (torch.tensor([1, 0, 2, 1]), "indices")],
)
def test_rows_without_a_sure_teacher_are_refused(column: Tensor | None, message: str, tmp_path: Path) -> None:
    trajectory = make_distillation(make_rows(), two_teachers(tmp_path))
    with pytest.raises(ValueError, match=message):
        _loss("fused", tmp_path, replace(trajectory, teacher_index=column), make_small(0))


def test_log_probabilities_in_an_order_of_their_own_are_refused(tmp_path: Path) -> None:
    class Reversed(DenseLogprobs):
        def __call__(self, model: nn.Module, rollout: Rollout) -> Tensor:
            return super().__call__(model, rollout.rows(torch.tensor([3, 2, 1, 0])))

    trajectory = make_distillation(make_rows(), two_teachers(tmp_path))
    with pytest.raises(ValueError, match="logprobs: .*order"):
        FORMS["fused"](make_small(0), trajectory, Reversed(), make_side(tmp_path, WIDTHS))


@pytest.mark.parametrize("form", FORMS)
def test_no_token_costs_nothing_but_reaches_every_parameter(form: str, tmp_path: Path) -> None:
    rollout = make_rows()
    nothing = replace(rollout, response_mask=torch.zeros_like(rollout.response_mask))
    trajectory = make_distillation(nothing, two_teachers(tmp_path), kind=_kind(form))
    student = make_small(0)
    loss = _loss(form, tmp_path, trajectory, student)
    loss.backward()
    assert loss == 0
    assert all(p.grad is not None and not p.grad.any() for p in student.parameters())


def test_metrics_are_those_of_reverse_kl_and_entropy_whatever_the_divergence(tmp_path: Path) -> None:
    student, teachers, rollout = make_small(0), two_teachers(tmp_path), make_rows()
    rollout = replace(rollout, source=["x", "y", "x", "z"])
    mask = rollout.response_mask
    weights = mask.float()
    weights[3] = 0  # a row that is not trained counts nowhere
    trajectory = make_distillation(rollout, teachers, weights=weights)
    side = make_side(tmp_path, WIDTHS)
    out = FullVocabulary(divergence=JSD(beta=0.3), payload=HiddenStates(dtype="fp32"))(
        student, trajectory, DenseLogprobs(), side
    )
    kl = _reference(student, teachers, rollout, ReverseKL())
    entropy = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(4):
        log_s = response_logits(student, rollout, row).log_softmax(-1)
        entropy[row, : len(log_s)] = -(log_s.exp() * log_s).sum(-1)
    rows = {"": [0, 1, 2], "teacher/t0/": [1], "teacher/t1/": [0, 2], "source/x/": [0, 2], "source/y/": [1]}
    for prefix, own in rows.items():
        values = {"reverse_kl": kl[own][mask[own]], "student_entropy": entropy[own][mask[own]]}
        for name, expected in values.items():
            total, count = out.metrics[f"{prefix}{name}"]
            assert count == len(expected)
            torch.testing.assert_close(total.double(), expected.sum(), rtol=1e-4, atol=0)
        least, greatest = values["reverse_kl"].aminmax()
        torch.testing.assert_close(out.minima[f"{prefix}reverse_kl_min"].double(), least, rtol=1e-4, atol=0)
        torch.testing.assert_close(out.maxima[f"{prefix}reverse_kl_max"].double(), greatest, rtol=1e-4, atol=0)
    assert out.metrics["source/z/reverse_kl"][1] == 0 and out.minima["source/z/reverse_kl_min"] == torch.inf
    assert out.metrics["loss"] == (out.loss, weights.sum())


def test_full_vocabulary_refuses_to_fuse_logits_and_chunks_of_nothing() -> None:
    with pytest.raises(ConfigError, match="fused: got true with a payload of logits"):
        FullVocabulary(payload=Logits())
    with pytest.raises(ConfigError, match="chunk_size: got 0"):
        FullVocabulary(chunk_size=0)

"""p_s = (1/2, 1/2), p_t = (1/4, 3/4): every number below is worked out by hand from these."""

from math import log

import pytest
import torch

from tests.torchtune_grpo.distillation.dense import dense, kl, normal
from torchtune_grpo.config import ConfigError, instantiate
from torchtune_grpo.distillation import JSD, CrossEntropy, Divergence, ForwardKL, ReverseKL, divergence_from_logits

# (component, its value, its gradient with respect to the first logit)
BY_HAND = [
    (ReverseKL(), 0.143841, 0.274653),  # ln(4/3) / 2; (ln 2 - value) / 2
    (ForwardKL(), 0.130812, 0.25),  # ln(1/2) / 4 + 3 ln(3/2) / 4; 1/2 - 1/4
    (CrossEntropy(), 0.836988, 0.274653),  # ln 4 / 2 + ln(4/3) / 2; (ln 4 - value) / 2
    # m = (3/8, 5/8): KL(t||m) = 0.035375, KL(s||m) = 0.032269; (ln(4/3) - 0.032269) / 4
    (JSD(beta=0.5), 0.033822, 0.063853),
    # m = (7/16, 9/16): KL(t||m) = 0.075858, KL(s||m) = 0.007874; 3/8 (ln(8/7) - 0.007874)
    (JSD(beta=0.25), 0.024870, 0.047121),
]


@pytest.mark.parametrize(("divergence", "value", "gradient"), BY_HAND)
def test_divergence_of_two_tokens_by_hand(divergence: Divergence, value: float, gradient: float) -> None:
    student = torch.tensor([[7.0, 7.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, log(3)]])
    total, statistics = divergence_from_logits(divergence, student, teacher, torch.ones(1))
    total.backward()
    assert total.item() == pytest.approx(value, abs=2e-6)
    assert student.grad[0].tolist() == pytest.approx([gradient, -gradient], abs=2e-6)
    assert statistics.divergence.item() == total.item()
    assert statistics.reverse_kl.item() == pytest.approx(0.143841, abs=2e-6)
    assert statistics.student_entropy.item() == pytest.approx(log(2), abs=2e-6)


@pytest.mark.parametrize(("divergence", "value", "gradient"), BY_HAND)
def test_divergence_at_half_the_temperature_by_hand(divergence: Divergence, value: float, gradient: float) -> None:
    """Logits half as far apart give the same distributions; the gradient is divided by the temperature."""
    student = torch.tensor([[3.5, 3.5]], requires_grad=True)
    teacher = torch.tensor([[0.0, log(3) / 2]])
    total, _ = divergence_from_logits(divergence, student, teacher, torch.ones(1), temperature=0.5)
    total.backward()
    assert total.item() == pytest.approx(value, abs=2e-6)
    assert student.grad[0].tolist() == pytest.approx([2 * gradient, -2 * gradient], abs=4e-6)


def test_jsd_over_beta_tends_to_the_forward_and_over_one_minus_beta_to_the_reverse_kl() -> None:
    student, teacher = normal(3, 6, seed=0).log_softmax(dim=-1), normal(3, 6, seed=1).log_softmax(dim=-1)
    gradients = {name: _gradient(name, student, teacher) for name in ("forward_kl", "reverse_kl")}
    for beta, scale, limit, name in (
        (1e-6, 1e-6, kl(teacher, student), "forward_kl"),
        (1 - 1e-6, 1e-6, kl(student, teacher), "reverse_kl"),
    ):
        leaf = student.clone().requires_grad_()
        total, statistics = divergence_from_logits(JSD(beta=beta), leaf, teacher, torch.ones(3))
        total.backward()
        torch.testing.assert_close(statistics.divergence / scale, limit, rtol=1e-4, atol=0)
        torch.testing.assert_close(leaf.grad / scale, gradients[name], rtol=1e-4, atol=1e-5)


def _gradient(name: str, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    leaf = student.clone().requires_grad_()
    return torch.autograd.grad(dense(name, leaf, teacher).sum(), leaf)[0]


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_jsd_refuses_beta_outside_the_open_interval(beta: float) -> None:
    with pytest.raises(ConfigError, match="beta: got"):
        JSD(beta=beta)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"_component_": "torchtune_grpo.distillation.ReverseKL"}, ReverseKL()),
        ({"_component_": "torchtune_grpo.distillation.ForwardKL"}, ForwardKL()),
        ({"_component_": "torchtune_grpo.distillation.JSD", "beta": 0.3}, JSD(beta=0.3)),
        ({"_component_": "torchtune_grpo.distillation.CrossEntropy"}, CrossEntropy()),
    ],
)
def test_divergences_are_components(node: dict, expected: Divergence) -> None:
    assert instantiate(node) == expected

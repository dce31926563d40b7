import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtune_grpo.config import ConfigError
from torchtune_grpo.kl import LOG_RATIO_BOUND, check_coefficient, check_estimator, kl_estimate


def _policies() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits, ref_logits = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), ref_logits.log_softmax(dim=0)


def _expected_gradient(estimator: str) -> torch.Tensor:
    """Mean over all tokens that the policy can sample of the gradient of the estimate."""
    logits, ref = _policies()
    logprobs = logits.log_softmax(dim=0)
    estimate = (logprobs.exp().detach() * kl_estimate(logprobs, ref, estimator)).sum()
    return torch.autograd.grad(estimate, logits)[0]


def _exact_gradient(reverse: bool) -> torch.Tensor:
    logits, ref = _policies()
    logprobs = logits.log_softmax(dim=0)
    kl = (logprobs.exp() * (logprobs - ref)).sum() if reverse else (ref.exp() * (ref - logprobs)).sum()
    return torch.autograd.grad(kl, logits)[0]


@pytest.mark.parametrize(
    ("estimator", "logprob", "ref", "expected"),
    [
        ("k1", -1.0, -1.5, 0.5),
        ("k1", -1.5, -1.0, -0.5),
        ("k2", -1.0, -1.5, 0.125),
        ("k3", -1.0, -1.5, 0.10653),
        ("k3", -1.5, -1.0, 0.14872),
        ("k3", -1.0, -1.0, 0.0),
    ],
)
def test_kl_estimate_values(estimator: str, logprob: float, ref: float, expected: float) -> None:
    value = kl_estimate(torch.tensor(logprob), torch.tensor(ref), estimator)
    assert value.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimate_mean_over_policy_is_exact_kl(estimator: str) -> None:
    logits, ref = _policies()
    logprobs = logits.log_softmax(dim=0)
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    estimate = (logprobs.exp() * kl_estimate(logprobs, ref, estimator)).sum()
    torch.testing.assert_close(estimate, exact)


def test_kl_estimate_k1_gradient_is_zero_on_average() -> None:
    torch.testing.assert_close(_expected_gradient("k1"), torch.zeros(7, dtype=torch.float64), atol=1e-12, rtol=0)


def test_kl_estimate_k2_gradient_is_that_of_reverse_kl() -> None:
    torch.testing.assert_close(_expected_gradient("k2"), _exact_gradient(reverse=True))


def test_kl_estimate_k3_gradient_is_that_of_forward_kl() -> None:
    torch.testing.assert_close(_expected_gradient("k3"), _exact_gradient(reverse=False))


@given(st.floats(-60, 0, width=32), st.floats(-60, 0, width=32))
def test_kl_estimate_k3_is_finite_and_never_negative(logprob: float, ref: float) -> None:
    value = kl_estimate(torch.tensor(logprob), torch.tensor(ref), "k3")
    assert 0 <= value < float("inf")


def test_kl_estimate_k3_never_negative_for_tiny_differences() -> None:
    difference = torch.logspace(-12, -1, 100_000, dtype=torch.float32)
    difference = torch.cat([difference, -difference])
    assert (kl_estimate(difference, torch.zeros_like(difference), "k3") >= 0).all()


def test_kl_estimate_k3_keeps_precision_near_reference() -> None:
    value = kl_estimate(torch.tensor(1e-3), torch.tensor(0.0), "k3")
    assert value.item() == pytest.approx(4.998334e-07, rel=1e-3)  # d^2/2 - d^3/6


def test_kl_estimate_k3_beyond_bound_carries_no_gradient() -> None:
    logprob = torch.tensor(-300.0, requires_grad=True)
    value = kl_estimate(logprob, torch.tensor(-1.0), "k3")
    value.backward()
    assert value.item() == pytest.approx(torch.tensor(LOG_RATIO_BOUND).exp().item(), rel=1e-4)
    assert logprob.grad.item() == 0


def test_check_estimator_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="k1, k2, k3"):
        check_estimator("k4")


def test_check_coefficient_refuses_negative() -> None:
    check_coefficient(0.0)
    with pytest.raises(ConfigError, match="coefficient"):
        check_coefficient(-0.1)

import math

import pytest
import torch
from torch import Tensor

from torchtune_grpo.generation.sampling import inverse_transform, sample, truncate, uniforms

ALMOST_ONE = 1 - 2**-24  # the largest number that torch.rand returns


def _draw(probs: list[float], uniform: float, **settings: float) -> int:
    logits = torch.tensor([probs]).log()
    ids, _ = sample(logits, torch.tensor([uniform]), temperature=1.0, **settings)
    return int(ids)


@pytest.mark.parametrize(
    ("uniform", "expected"),
    [(0.0, 0), (0.19, 0), (0.21, 1), (0.49, 1), (0.51, 2), (0.99, 2), (ALMOST_ONE, 2)],
)
def test_sample_inverts_the_distribution(uniform: float, expected: int) -> None:
    assert _draw([0.2, 0.3, 0.5], uniform) == expected


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.6, ALMOST_ONE])
def test_sample_never_chooses_a_token_of_probability_zero(uniform: float) -> None:
    assert _draw([0.0, 0.4, 0.0, 0.6, 0.0, 0.0], uniform) in (1, 3)


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE])
def test_sample_never_chooses_a_truncated_token(uniform: float) -> None:
    probs = [0.1, 0.25, 0.3, 0.2, 0.15]
    assert _draw(probs, uniform, top_k=2) == (1 if uniform == 0.0 else 2)


def test_sample_stays_among_the_kept_tokens_at_both_ends() -> None:
    """Totals of every size, where the last number times the total could round up to the total."""
    logits = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0))
    kept = logits.topk(3).indices
    for uniform in (0.0, ALMOST_ONE):
        ids, _ = sample(logits, torch.full((4000,), uniform), temperature=1.0, top_k=3)
        assert (ids[:, None] == kept).any(dim=1).all()


@pytest.mark.parametrize("vocab", [50_257, 151_936])
def test_sample_reaches_the_end_of_a_large_vocabulary(vocab: int) -> None:
    """A flat distribution: the token's place is the uniform number's, also where fp32 sums would drift."""
    uniform = torch.tensor([0.0, 0.25, 0.5, 0.75, 0.9, ALMOST_ONE])
    ids, logprobs = sample(torch.zeros(6, vocab), uniform, temperature=1.0)
    assert (ids - (uniform.double() * vocab).long()).abs().max() <= 1
    torch.testing.assert_close(logprobs, torch.full((6,), -math.log(vocab)))


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000])
def test_inverse_transform_finds_the_token_that_a_plain_search_finds(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.randn(200, vocab, generator=generator).exp() * (torch.rand(200, vocab, generator=generator) > 0.3)
    weights[:, -1] += 0.5
    uniform = torch.rand(200, generator=generator)
    cdf = weights.double().cumsum(dim=1)
    target = uniform.double() * cdf[:, -1]
    drawn = inverse_transform(weights, uniform)
    assert weights.gather(1, drawn[:, None]).min() > 0
    after = cdf.gather(1, drawn[:, None]).squeeze(1)
    before = after - weights.gather(1, drawn[:, None]).squeeze(1).double()
    slack = 1e-6 * cdf[:, -1]  # sums of blocks are fp32
    assert (before - slack <= target).all() and (target <= after + slack).all()
    assert (torch.searchsorted(cdf, target[:, None], right=True).squeeze(1) == drawn).float().mean() > 0.98


def test_inverse_transform_stays_among_positive_weights_at_both_ends() -> None:
    weights = torch.zeros(3, 1000)
    weights[0, 300:303], weights[1, 999], weights[2, 0] = torch.tensor([1e-30, 0.0, 2e-30]), 3e7, 1e-9
    for uniform, expected in ((0.0, [300, 999, 0]), (ALMOST_ONE, [302, 999, 0])):
        assert inverse_transform(weights, torch.full((3,), uniform)).tolist() == expected


def _chi_square(logits: Tensor, temperature: float, draws: int) -> tuple[float, int]:
    noise = uniforms(torch.tensor([11]), 1, draws)[0]
    ids, _ = sample(logits.expand(draws, -1), noise, temperature=temperature)
    expected = (logits.double() / temperature).softmax(dim=-1) * draws
    counts = torch.bincount(ids, minlength=len(logits)).double()
    return float(((counts - expected).square() / expected).sum()), len(logits)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_sample_follows_softmax(temperature: float) -> None:
    logits = torch.tensor([1.0, -0.5, 0.3, 2.0, 0.0, -1.5, 1.2, 0.7])
    statistic, cells = _chi_square(logits, temperature, 20_000)
    assert statistic < 26  # 7 degrees of freedom: p = 5e-4
    assert cells == 8


def test_sample_logprobs_divide_logits_by_the_temperature() -> None:
    _, logprobs = sample(torch.tensor([[2.0, 0.0]]), torch.tensor([0.0]), temperature=0.5)
    torch.testing.assert_close(logprobs, torch.tensor([-0.01815]), atol=5e-6, rtol=0)


def test_sample_greedy_takes_the_likeliest_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5], [3.0, 1.0, 2.0]])
    ids, logprobs = sample(logits, torch.tensor([0.0, 0.9]), temperature=0.0)
    assert ids.tolist() == [1, 0]
    expected = [-math.log(1 + math.exp(-1) + math.exp(-0.5)), -math.log(1 + math.exp(-2) + math.exp(-1))]
    torch.testing.assert_close(logprobs, torch.tensor(expected))


def test_sample_computes_in_fp32_whatever_the_logits() -> None:
    logits = torch.tensor([[1.5, 0.25, -2.0]], dtype=torch.bfloat16)
    _, logprobs = sample(logits, torch.tensor([0.0]), temperature=1.0)
    assert logprobs.dtype == torch.float32
    expected = math.log(math.exp(1.5) / (math.exp(1.5) + math.exp(0.25) + math.exp(-2)))
    torch.testing.assert_close(logprobs, torch.tensor([expected]))


def test_sample_logprobs_of_a_truncated_distribution_are_over_the_whole_vocabulary() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    ids, logprobs = sample(logits, torch.tensor([0.99]), temperature=1.0, top_k=2)
    assert ids.item() == 1
    torch.testing.assert_close(logprobs, torch.tensor([math.log(0.3)]))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.3}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.72}, [0, 1, 3]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"min_p": 0.74}, [1, 3]),
        ({"min_p": 0.3}, [0, 1, 3]),
        ({"min_p": 0.24}, [0, 1, 2, 3]),
        ({"top_k": 3, "top_p": 0.75}, [1, 3]),  # 0.4 + 0.3 are 0.78 of the 0.9 that top-k left
        ({"min_p": 0.6, "top_p": 0.5}, [1]),  # 0.4 is 0.57 of the 0.7 that min-p left
    ],
)
def test_truncate_keeps(settings: dict[str, float], kept: list[int]) -> None:
    probs = torch.tensor([[0.2, 0.4, 0.1, 0.3]])
    result = truncate(probs, **{"top_k": None, "top_p": None, "min_p": None} | settings)
    assert result[0].nonzero().flatten().tolist() == kept
    assert torch.equal(result[0, kept], probs[0, kept])


def test_truncate_judges_each_row_by_itself() -> None:
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.3, 0.6]])
    result = truncate(probs, top_k=None, top_p=0.5, min_p=None)
    torch.testing.assert_close(result, torch.tensor([[0.6, 0.0, 0.0], [0.0, 0.0, 0.6]]))


def test_uniforms_depend_on_the_seed_alone() -> None:
    both = uniforms(torch.tensor([3, 2**62]), 2, 5)
    assert both.shape == (4, 5) and both.dtype == torch.float32
    assert torch.equal(both[2:], uniforms(torch.tensor([2**62]), 2, 5))
    assert len({row.tolist()[0] for row in both}) == 4
    assert 0 <= both.min() and both.max() < 1

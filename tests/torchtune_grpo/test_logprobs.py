from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from tests.torchtune_grpo.builders import make_rollout
from tests.torchtune_grpo.tiny_models import KINDS, VOCAB, dense_logprobs, make_model
from torchtune_grpo.layout import shift_left
from torchtune_grpo.logprobs import DenseLogprobs, FullSoftmaxHead
from torchtune_grpo.types import Rollout


def _rollout(response_lengths: tuple[int, ...] = (3, 1, 5, 2), extra: int = 2) -> Rollout:
    return make_rollout(list(response_lengths), prompt_lengths=[1, 4, 2, 3][: len(response_lengths)], extra=extra)


class _Logits(nn.Module):
    """A model whose output layer passes hidden states through as logits."""

    output = staticmethod(lambda hidden: hidden)


def test_full_softmax_head_divides_logits_by_the_temperature() -> None:
    hidden, targets = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1])
    logprobs = FullSoftmaxHead()(_Logits(), hidden, targets, 0.5)
    # softmax of [4, 0]
    torch.testing.assert_close(logprobs, torch.tensor([-0.01815, -4.01815]), atol=5e-6, rtol=0)


def test_full_softmax_head_is_fp32_under_bf16_logits() -> None:
    hidden = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    logprobs = FullSoftmaxHead()(_Logits(), hidden, torch.tensor([0]), 1.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, torch.tensor([-2.126928]))  # -2 - log(1 + e^-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False])
def test_dense_logprobs_equal_a_float64_forward(kind: str, temperature: float, tied: bool) -> None:
    model, rollout = make_model(kind, tied=tied), _rollout()
    expected = dense_logprobs(model, rollout, temperature).float()
    actual = DenseLogprobs(temperature=temperature)(model, rollout)
    torch.testing.assert_close(actual.detach(), expected, atol=1e-5, rtol=0)


def test_dense_logprobs_of_a_row_do_not_depend_on_its_neighbours_or_padding() -> None:
    model = make_model("gqa")
    padded = _rollout(extra=4)
    rollout = replace(
        padded,
        tokens=padded.tokens[:, 4:-4],
        positions=padded.positions[:, 4:-4],
        response_mask=padded.response_mask[:, :-4],
        old_logprobs=padded.old_logprobs[:, :-4],
    )
    tight = DenseLogprobs()(model, rollout)
    torch.testing.assert_close(DenseLogprobs()(model, padded)[:, :5], tight, atol=1e-5, rtol=0)
    for row, length in enumerate([3, 1, 5, 2]):
        alone = DenseLogprobs()(model, rollout.rows(torch.tensor([row])))
        torch.testing.assert_close(alone[0, :length], tight[row, :length], atol=1e-5, rtol=0)


def test_dense_logprobs_ignore_pad_ids_and_old_logprobs() -> None:
    model, rollout = make_model("mha"), _rollout()
    column = torch.arange(rollout.tokens.shape[1])
    start = rollout.prompt_width - rollout.prompt_lengths[:, None]
    end = rollout.prompt_width + rollout.response_lengths[:, None]
    padding = (column < start) | (column >= end)
    other = replace(
        rollout,
        tokens=rollout.tokens.masked_fill(padding, VOCAB - 1),
        old_logprobs=torch.full_like(rollout.old_logprobs, torch.nan),
    )
    assert torch.equal(DenseLogprobs()(model, rollout), DenseLogprobs()(model, other))


@dataclass(frozen=True, kw_only=True)
class _CountingHead:
    seen: list[int]

    def __call__(self, model: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        self.seen.append(len(hidden))
        return FullSoftmaxHead()(model, hidden, targets, temperature)


def test_dense_logprobs_build_logits_only_where_a_response_token_is_predicted() -> None:
    seen: list[int] = []
    DenseLogprobs(head=_CountingHead(seen=seen))(make_model("mha"), _rollout())
    assert seen == [3 + 1 + 5 + 2]


def _dense_gradients(model: nn.Module, rollout: Rollout, coefficients: Tensor) -> list[Tensor]:
    """By torchtune's own causal forward of each row without padding."""
    total = torch.zeros(())
    for row, (prompt, response) in enumerate(
        zip(rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist(), strict=True)
    ):
        start = rollout.prompt_width - prompt
        ids = rollout.tokens[row, start : start + prompt + response]
        logprobs = model(ids[None])[0].log_softmax(dim=-1)
        predicted = logprobs[prompt - 1 : prompt - 1 + response]
        chosen = predicted.gather(1, ids[prompt:, None])[:, 0]
        total = total + (coefficients[row, :response] * chosen).sum()
    return list(torch.autograd.grad(total, list(model.parameters())))


@pytest.mark.parametrize("tied", [True, False])
def test_dense_logprobs_gradient_equals_that_of_whole_logits(tied: bool) -> None:
    model, rollout = make_model("gqa", tied=tied), _rollout()
    coefficients = torch.randn(rollout.response_mask.shape, generator=torch.Generator().manual_seed(3))
    logprobs = DenseLogprobs()(model, rollout)
    actual = torch.autograd.grad((coefficients * logprobs).sum(), list(model.parameters()))
    expected = _dense_gradients(model, rollout, coefficients)
    torch.testing.assert_close(list(actual), expected, atol=1e-4, rtol=1e-4)


def test_dense_logprobs_of_no_token_are_zero_with_zero_gradient() -> None:
    model = make_model("mha")
    logprobs = DenseLogprobs()(model, _rollout((0, 0), extra=1))
    assert logprobs.shape == (2, 2) and not logprobs.any()
    logprobs.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_dense_logprobs_restore_the_models_head_after_an_error() -> None:
    def fails(*_: object) -> Tensor:
        raise RuntimeError("no memory")

    model = make_model("mha")
    with pytest.raises(RuntimeError, match="no memory"):
        DenseLogprobs(head=fails)(model, _rollout())
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, VOCAB)


def test_shift_left_moves_each_row_to_position_0() -> None:
    tokens = torch.tensor([[9, 9, 1, 2], [3, 4, 5, 6], [9, 9, 9, 7]])
    shifted = shift_left(tokens, torch.tensor([2, 0, 3]))
    assert shifted.tolist() == [[1, 2, 2, 2], [3, 4, 5, 6], [7, 7, 7, 7]]

"""Bytes that PyTorch allocates in forward and backward, at T = 1024 and V = 32000."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.torchtune_grpo.distillation.allocations import Allocations, allocations
from torchtune_grpo.distillation import JSD, ReverseKL, divergence_from_hidden, divergence_from_logits, divergence_fused

ROWS, VOCABULARY, WIDTH = 1024, 32_000, 8
WEIGHTS = torch.full((ROWS,), 1 / ROWS)


def _hidden(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, WIDTH).to(dtype)


def _head(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(VOCABULARY, WIDTH).to(dtype)


def _fused(chunk_size: int, dtype: torch.dtype = torch.float32, divergence: Callable | None = None) -> Allocations:
    student = _hidden(dtype).requires_grad_(), _head(dtype).requires_grad_()
    teacher = _hidden(dtype), _head(dtype)

    def run() -> None:
        divergence_fused(divergence or ReverseKL(), *student, *teacher, WEIGHTS, chunk_size=chunk_size)[0].backward()

    return allocations(run)


def _gradient_bytes(dtype: torch.dtype) -> int:
    """Of hidden states and head: fp32 sums, and what they are cast to."""
    return (ROWS + VOCABULARY) * WIDTH * (4 if dtype == torch.float32 else 4 + 2)


@pytest.mark.parametrize("divergence", [ReverseKL(), JSD(beta=0.5)])
def test_divergence_fused_peaks_below_a_twentieth_of_the_logits(divergence: Callable) -> None:
    seen = _fused(16, divergence=divergence)
    assert seen.peak - _gradient_bytes(torch.float32) <= 0.05 * ROWS * VOCABULARY * 4


def test_divergence_fused_makes_nothing_larger_than_a_chunk() -> None:
    chunk, head = 64 * VOCABULARY * 4, VOCABULARY * WIDTH * 4
    assert _fused(64).largest == max(chunk, head) == chunk


def test_divergence_fused_in_bf16_keeps_chunks_in_bf16() -> None:
    chunk = 64 * VOCABULARY * 2
    seen = _fused(64, torch.bfloat16)
    assert seen.largest == chunk
    tiles = 10 * 2**16 * 4
    assert seen.peak <= 2 * chunk + _gradient_bytes(torch.bfloat16) + tiles


def test_divergence_fused_peak_falls_with_the_chunk_size() -> None:
    small, large = _fused(16).peak, _fused(128).peak
    # Student and teacher: two chunks, each 112 rows smaller.
    assert large - small == pytest.approx(2 * 112 * VOCABULARY * 4, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divergence_from_hidden_peaks_at_one_gradient_buffer_and_two_chunks(dtype: torch.dtype) -> None:
    logits, hidden, head = torch.randn(ROWS, VOCABULARY).to(dtype).requires_grad_(), _hidden(dtype), _head(dtype)

    def run() -> None:
        divergence_from_hidden(ReverseKL(), logits, hidden, head, WEIGHTS, chunk_size=32)[0].backward()

    seen = allocations(run)
    assert seen.largest == logits.nbytes
    assert seen.peak <= logits.nbytes + 2 * 32 * VOCABULARY * 4


def test_divergence_from_logits_peaks_at_one_gradient_buffer_and_two_chunks() -> None:
    logits, teacher = torch.randn(ROWS, VOCABULARY).requires_grad_(), torch.randn(ROWS, VOCABULARY)

    def run() -> None:
        divergence_from_logits(ReverseKL(), logits, teacher, WEIGHTS, chunk_size=16)[0].backward()

    assert allocations(run).peak <= logits.nbytes + 2 * 16 * VOCABULARY * 4


def test_divergence_from_logits_without_grad_mode_makes_no_gradient_buffer() -> None:
    logits, teacher = torch.randn(ROWS, VOCABULARY).requires_grad_(), torch.randn(ROWS, VOCABULARY)

    def run() -> None:
        with torch.no_grad():
            divergence_from_logits(ReverseKL(), logits, teacher, WEIGHTS, chunk_size=16)

    assert allocations(run).peak <= 2 * 16 * VOCABULARY * 4


def test_allocations_of_plain_pytorch_are_several_logits() -> None:
    """The tracker sees what it should: three results of which none may be dropped before the backward pass."""
    logits = torch.randn(64, 100, requires_grad=True)
    seen = allocations(lambda: logits.log_softmax(dim=-1).exp().square().sum().backward())
    assert seen.largest == logits.nbytes
    assert 3 * logits.nbytes <= seen.peak <= 6 * logits.nbytes

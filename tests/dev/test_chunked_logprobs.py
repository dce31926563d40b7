from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from benchmarks.memory import peak_bytes
from dev.chunked_logprobs import ChunkedHead, FusedLinearHead, chunked_logprobs, fused_logprobs
from tests.torchtune_grpo.builders import make_rollout
from tests.torchtune_grpo.distributed_helpers import run_ranks
from tests.torchtune_grpo.tiny_models import make_model
from torchtune_grpo.config import ConfigError
from torchtune_grpo.logprobs import DenseLogprobs, TargetHead
from torchtune_grpo.training.distributed import Ranks, build_sharded
from torchtune_grpo.types import Rollout

T, D, V = 7, 5, 13
CHUNKS = [1, 3, 13, 1000, None]
HEADS = [ChunkedHead(chunk_size=3), FusedLinearHead(chunk_size=5), ChunkedHead(), FusedLinearHead(chunk_size=None)]


def _via_logits(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_size: int | None) -> Tensor:
    return chunked_logprobs(hidden @ weight.T, targets, temperature, chunk_size)


METHODS = [_via_logits, fused_logprobs]


def _inputs(rows: int = T, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (rows,), generator=generator)


def _values_and_gradients(logprobs: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Under upstream gradients of either sign and a zero."""
    upstream = torch.arange(len(logprobs), dtype=logprobs.dtype) - 2
    return [logprobs.detach(), *torch.autograd.grad((upstream * logprobs).sum(), inputs)]


def _dense(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> list[Tensor]:
    """Float64 autograd through all logits."""
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logprobs = (hidden @ weight.T / temperature).log_softmax(dim=-1)[torch.arange(len(targets)), targets]
    return _values_and_gradients(logprobs, hidden, weight)


@pytest.mark.parametrize("head", HEADS)
def test_heads_divide_logits_by_the_temperature(head: TargetHead) -> None:
    model = nn.Module()
    model.output = nn.Linear(2, 2, bias=False)
    nn.init.eye_(model.output.weight)
    hidden, targets = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1])
    logprobs = head(model, hidden, targets, 0.5)
    # softmax of [4, 0]
    torch.testing.assert_close(logprobs.detach(), torch.tensor([-0.01815, -4.01815]), atol=5e-6, rtol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk_size", [1, 4, None])
def test_gradients_equal_finite_differences(method: Callable[..., Tensor], chunk_size: int | None) -> None:
    hidden, weight, targets = _inputs()
    assert torch.autograd.gradcheck(lambda h, w: method(h, w, targets, 0.7, chunk_size), (hidden, weight))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients_equal_dense_for_every_chunk_size(
    method: Callable[..., Tensor], chunk_size: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    hidden, weight, targets = _inputs(dtype=dtype)
    actual = _values_and_gradients(method(hidden, weight, targets, 1.3, chunk_size), hidden, weight)
    assert {x.dtype for x in actual} == {dtype}
    expected = [x.to(dtype) for x in _dense(hidden, weight, targets, 1.3)]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_large_logits_do_not_overflow(method: Callable[..., Tensor]) -> None:
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    values, *gradients = _values_and_gradients(method(hidden, weight, torch.tensor([1, 2]), 1.0, 2), hidden, weight)
    assert values.tolist() == [-300.0, 0.0]
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_chunked_gradient_of_bf16_logits_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(T, V, generator=generator)).bfloat16().requires_grad_()
    targets = torch.randint(0, V, (T,), generator=generator)
    logprobs, gradient = _values_and_gradients(chunked_logprobs(logits, targets, 1.3, 2), logits)
    wide = logits.detach().double().requires_grad_()
    exact = _values_and_gradients((wide / 1.3).log_softmax(dim=-1)[torch.arange(T), targets], wide)
    assert logprobs.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    torch.testing.assert_close(logprobs, exact[0].float(), atol=2e-6, rtol=2e-6)
    # Half a unit in the last place of 8 significant bits: at most 2^-8 of the value.
    torch.testing.assert_close(gradient.double(), exact[1], atol=1e-9, rtol=1.001 * 2**-8)


@pytest.mark.parametrize("chunk_size", [1, 100, None])
def test_fused_gradients_in_bf16_do_not_lose_small_terms(chunk_size: int | None) -> None:
    """512 tokens of nearly equal probability: a sum kept in bf16 would stop growing at 256 of them."""
    generator = torch.Generator().manual_seed(2)
    # Quarters up to 2: every logit is exact in bf16, in any order of summation.
    hidden = (torch.randint(0, 2, (4, 4), generator=generator) / 4).bfloat16().requires_grad_()
    weight = (torch.randint(4, 7, (512, 4), generator=generator) / 4).bfloat16().requires_grad_()
    targets = torch.tensor([0, 1, 2, 3])
    logprobs, *gradients = _values_and_gradients(
        fused_logprobs(hidden, weight, targets, 1.0, chunk_size), hidden, weight
    )
    exact, *exact_gradients = _dense(hidden, weight, targets, 1.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, exact.float(), atol=2e-6, rtol=2e-6)
    # d loss / d logits, rounded to bf16 (2^-8 of each), times the other factor (2^-8 of each block's sum), rounded.
    softmax = (hidden.double() @ weight.double().T).softmax(dim=-1)
    one_hot = nn.functional.one_hot(targets, 512)
    d_logits = ((torch.arange(4) - 2)[:, None] * (one_hot - softmax)).abs().detach()
    scales = [d_logits @ weight.detach().double().abs(), d_logits.T @ hidden.detach().double().abs()]
    for gradient, expected, scale in zip(gradients, exact_gradients, scales, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert ((gradient.double() - expected).abs() <= 3.1 * 2**-8 * scale + 1e-9).all()


@pytest.mark.parametrize("method", METHODS)
def test_no_rows_give_no_logprobs_and_zero_gradients(method: Callable[..., Tensor]) -> None:
    hidden, weight, targets = _inputs(rows=0)
    for chunk_size in (4, None):
        logprobs = method(hidden, weight, targets, 1.0, chunk_size)
        assert logprobs.shape == (0,)
        gradients = torch.autograd.grad(logprobs.sum(), [hidden, weight])
        assert [g.shape for g in gradients] == [hidden.shape, weight.shape] and not gradients[1].any()


def _peak(
    fn: Callable[..., Tensor], *inputs: Tensor, chunk_size: int | None, wanted: Sequence[Tensor] | None = None
) -> int:
    """Bytes above the inputs in forward and in backward to ``wanted`` (None: all inputs; empty: forward alone)."""
    targets = torch.zeros(len(inputs[0]), dtype=torch.int64)
    wanted = inputs if wanted is None else wanted

    def run() -> object:
        with torch.set_grad_enabled(bool(wanted)):
            logprobs = fn(*inputs, targets, 0.5, chunk_size)
        return torch.autograd.grad(logprobs.sum(), wanted) if wanted else logprobs

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each thread of a kernel has scratch space of its own
    try:
        return peak_bytes(run, "cpu")
    finally:
        torch.set_num_threads(threads)


def _zeros(*shapes: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]


DTYPES = pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])


@DTYPES
@pytest.mark.parametrize("chunk_size", [8, 100, None])
def test_chunked_peaks_at_one_gradient_and_one_chunk_or_two_chunks(
    dtype: torch.dtype, width: int, chunk_size: int | None
) -> None:
    rows, vocab = 128, 4096
    (logits,) = _zeros((rows, vocab), dtype=dtype)
    buffer, chunk, vectors = rows * vocab * width, (chunk_size or rows) * vocab * 4, 64 * rows
    assert buffer < _peak(chunked_logprobs, logits, chunk_size=chunk_size) <= max(buffer + chunk, 2 * chunk) + vectors
    assert _peak(chunked_logprobs, logits, chunk_size=chunk_size, wanted=[]) <= 2 * chunk + vectors


@DTYPES
def test_fused_never_holds_the_logits(dtype: torch.dtype, width: int) -> None:
    rows, vocab, dim, columns = 1024, 8192, 16, 64
    hidden, weight = _zeros((rows, dim), (vocab, dim), dtype=dtype)
    block = rows * columns * (width + 2)  # and a quarter of it in fp32, twice while its log-softmax is taken
    vectors = 64 * rows
    sum_of_hidden, gradient_of_weight = rows * dim * 4, vocab * dim * width
    peak = _peak(fused_logprobs, hidden, weight, chunk_size=columns)
    assert peak <= gradient_of_weight + sum_of_hidden + block + vectors
    assert _peak(fused_logprobs, hidden, weight, chunk_size=columns, wanted=[]) <= block + vectors


def test_fused_makes_no_gradient_of_a_frozen_head() -> None:
    hidden, weight, targets = _inputs()
    expected = _dense(hidden, weight, targets, 1.0)[1]
    (actual,) = _values_and_gradients(fused_logprobs(hidden, weight.detach(), targets, 1.0, 4), hidden)[1:]
    torch.testing.assert_close(actual, expected)
    hidden, weight = _zeros((8, 64), (4096, 64), dtype=torch.float32)
    peak = _peak(fused_logprobs, hidden, weight.detach(), chunk_size=256, wanted=[hidden])
    assert peak < weight.nbytes / 4


def _rollout(rank: int = 0) -> Rollout:
    lengths = [[3, 1, 5, 2], [0, 2]][rank]
    return make_rollout(lengths, prompt_lengths=[1, 4, 2, 3][: len(lengths)], extra=2, seed=rank)


def _loss(model: nn.Module, head: TargetHead, rank: int = 0) -> Tensor:
    logprobs = DenseLogprobs(temperature=0.7, head=head)(model, _rollout(rank))
    return (logprobs * torch.arange(1.0, 1 + logprobs.numel()).view_as(logprobs)).sum()


def _stable_gradients(tied: bool, rank: int) -> dict[str, Tensor]:
    model = make_model("gqa", tied=tied)
    _loss(model, DenseLogprobs().head, rank).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tied", [True, False])
def test_heads_in_a_model_give_the_stable_heads_values_and_gradients(head: TargetHead, tied: bool) -> None:
    model, rollout = make_model("gqa", tied=tied), _rollout()
    torch.testing.assert_close(DenseLogprobs(head=head)(model, rollout), DenseLogprobs()(model, rollout))
    _loss(model, head).backward()
    actual = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(actual, _stable_gradients(tied, 0), atol=1e-4, rtol=1e-4)


def _sharded_gradients(rank: int, head: TargetHead, tied: bool, reshard: bool) -> dict[str, Tensor]:
    model = build_sharded(
        lambda: make_model("gqa", tied=tied),
        lambda: make_model("gqa", tied=tied).state_dict(),
        ranks=Ranks(device=torch.device("cpu"), rank=rank, world_size=2),
    )
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(reshard, recurse=False)
    _loss(model, head, rank).backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def _on_rank(rank: int) -> dict[Any, dict[str, Tensor]]:
    """Rank 1 has fewer and shorter rows. With ``reshard`` the head's weight is freed between forward and backward."""
    cases = [(head, tied, reshard) for head in HEADS[:2] for tied in (True, False) for reshard in (True, False)]
    return {(type(head).__name__, *rest): _sharded_gradients(rank, head, *rest) for head, *rest in cases}


def test_heads_under_fsdp_reduce_the_gradient_of_the_head() -> None:
    for outcome in run_ranks(_on_rank):
        for (_, tied, _), actual in outcome.items():
            one, other = _stable_gradients(tied, 0), _stable_gradients(tied, 1)
            expected = {name: (one[name] + other[name]) / 2 for name in one}
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head", [ChunkedHead, FusedLinearHead])
@pytest.mark.parametrize("chunk_size", [0, -4])
def test_heads_refuse_a_chunk_size_below_one(head: type, chunk_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"chunk_size: got {chunk_size}, expected .* >= 1, or null"):
        head(chunk_size=chunk_size)


@pytest.mark.parametrize("output", [nn.Linear(D, V), nn.Identity()])
def test_fused_head_refuses_what_is_not_a_linear_map_without_bias(output: nn.Module) -> None:
    model = nn.Module()
    model.output = output
    with pytest.raises(ConfigError, match=rf"logprobs.head: got .* {type(output).__name__}, expected .*ChunkedHead"):
        FusedLinearHead()(model, torch.zeros(1, D), torch.zeros(1, dtype=torch.int64), 1.0)

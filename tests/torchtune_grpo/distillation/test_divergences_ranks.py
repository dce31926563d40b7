"""The vocabulary split unevenly over two gloo ranks: the same numbers as on one."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.torchtune_grpo.distillation.dense import DIVERGENCES, dense, normal
from tests.torchtune_grpo.distributed_helpers import run_ranks
from torchtune_grpo.distillation import (
    ReverseKL,
    divergence_from_hidden,
    divergence_from_logits,
    divergence_fused,
)

ROWS, VOCABULARY, WIDTH, TEACHER_WIDTH = 5, 11, 4, 3
SLICES = (slice(0, 7), slice(7, VOCABULARY))
OPTIONS = {"temperature": 0.8, "chunk_size": 2}
WEIGHTS = torch.tensor([0.3, 0.1, 0.6, 0.2, 0.4], dtype=torch.float64)
NAMES = ("from_logits", "from_hidden", "fused")


def _models(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Student's hidden states and head, teacher's hidden states and head; each rank's slice has its own maximum."""
    return (
        normal(ROWS, WIDTH, seed=seed),
        normal(VOCABULARY, WIDTH, seed=seed + 1, scale=2.0),
        normal(ROWS, TEACHER_WIDTH, seed=seed + 2),
        normal(VOCABULARY, TEACHER_WIDTH, seed=seed + 3, scale=3.0),
    )


def _run(form: str, name: str, columns: slice, group: dist.ProcessGroup | None, seed: int = 0) -> dict[str, Tensor]:
    """Sum, statistics and gradients of the student's inputs on a slice of the vocabulary."""
    hidden, weight, teacher_hidden, teacher_weight = _models(seed)
    weight, teacher = weight[columns], (teacher_hidden, teacher_weight[columns])
    leaves = {"hidden": hidden, "weight": weight} if form == "fused" else {"logits": hidden @ weight.T}
    leaves = {key: leaf.requires_grad_() for key, leaf in leaves.items()}
    student, options = list(leaves.values()), {**OPTIONS, "group": group}
    if form == "fused":
        total, statistics = divergence_fused(DIVERGENCES[name], *student, *teacher, WEIGHTS, **options)
    elif form == "from_hidden":
        total, statistics = divergence_from_hidden(DIVERGENCES[name], *student, *teacher, WEIGHTS, **options)
    else:
        logits = teacher[0] @ teacher[1].T
        total, statistics = divergence_from_logits(DIVERGENCES[name], *student, logits, WEIGHTS, **options)
    gradients = torch.autograd.grad(total, student)
    return {"total": total.detach(), **vars(statistics), **dict(zip(leaves, gradients, strict=True))}


def _on_rank(rank: int) -> dict[str, dict[str, Tensor]]:
    results = {
        f"{form} {name}": _run(form, name, SLICES[rank], dist.group.WORLD) for form in NAMES for name in DIVERGENCES
    }
    alone = [dist.new_group([member]) for member in range(2)]
    results["alone"] = _run("fused", "reverse_kl", slice(None), alone[rank], seed=10 * rank)
    return results


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, dict[str, Tensor]]]:
    return run_ranks(_on_rank)


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergence_on_two_ranks_equals_one(form: str, name: str, on_two_ranks: list) -> None:
    expected = _run(form, name, slice(None), None)
    hidden, weight, teacher_hidden, teacher_weight = _models()
    values = dense(name, hidden @ weight.T, teacher_hidden @ teacher_weight.T, OPTIONS["temperature"])
    torch.testing.assert_close(expected["divergence"], values)
    for columns, results in zip(SLICES, on_two_ranks, strict=True):
        actual = results[f"{form} {name}"]
        wanted = dict(expected)
        if form == "fused":
            wanted["weight"] = expected["weight"][columns]
        else:
            wanted["logits"] = expected["logits"][:, columns]
        torch.testing.assert_close(actual, wanted)


def test_divergence_reduces_over_its_group_alone(on_two_ranks: list) -> None:
    for rank, results in enumerate(on_two_ranks):
        torch.testing.assert_close(
            results["alone"], _run("fused", "reverse_kl", slice(None), None, seed=10 * rank), check_device=False
        )


@pytest.mark.parametrize(
    ("rows", "vocabulary", "chunks"),
    [(130, 50_000, [40, 40, 40, 10]), (130, 7, [40, 40, 40, 10]), (2048, 3, [40] * 51 + [8]), (4000, 3, [80] * 50)],
)
def test_default_chunk_size_is_a_fiftieth_whatever_the_slice(
    rows: int, vocabulary: int, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of uneven slices must make the same collectives: here a MAX and two SUMs for each chunk."""
    calls: list[tuple[object, int]] = []

    def all_reduce(tensor: Tensor, op: object, group: object) -> None:
        calls.append((op, tensor.shape[1]))

    monkeypatch.setattr("torchtune_grpo.distillation.chunked.dist.all_reduce", all_reduce)
    logits = torch.zeros(rows, vocabulary)
    divergence_from_logits(ReverseKL(), logits, logits, torch.ones(rows), group=object())
    operations = (dist.ReduceOp.MAX, dist.ReduceOp.SUM, dist.ReduceOp.SUM)
    assert calls == [(operation, size) for size in chunks for operation in operations]

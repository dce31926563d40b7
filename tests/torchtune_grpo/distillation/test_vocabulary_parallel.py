"""LM heads in two slices on two ranks: the same loss and gradient as in one piece, rows unevenly shared."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.torchtune_grpo.distillation.small_models import VOCAB, make_distillation, make_rows, make_side, make_small
from tests.torchtune_grpo.distillation.small_models import two_teachers as save_two_teachers
from tests.torchtune_grpo.distributed_helpers import run_ranks
from torchtune_grpo.config import ConfigError
from torchtune_grpo.distillation import FullVocabulary, HiddenStates, Logits
from torchtune_grpo.distillation import projection as projection_module
from torchtune_grpo.distillation.vocabulary_parallel import HeadGroup, make_head_group
from torchtune_grpo.logprobs import DenseLogprobs
from torchtune_grpo.training.distributed import Ranks

OBJECTIVES = {
    "logits": FullVocabulary(payload=Logits(dtype="fp32"), fused=False),
    "hidden": FullVocabulary(payload=HiddenStates(dtype="fp32"), fused=False, chunk_size=2),
    "fused": FullVocabulary(payload=HiddenStates(dtype="fp32"), chunk_size=2),
}
# Rank 1 holds no row of teacher 0; the second share leaves rank 1 one row and teacher 0 none at all.
SHARES = {"no row of one teacher": ([0, 1, 2], [3]), "nobody's teacher": ([0, 2], [3])}


def _ranks(world_size: int, rank: int = 0) -> Ranks:
    return Ranks(device=torch.device("cpu"), rank=rank, world_size=world_size)


def _spy(seen: list[tuple], states: Tensor, weight: Tensor) -> Tensor:
    seen.append((tuple(states.shape), tuple(weight.shape)))
    return torch.nn.functional.linear(states, weight)


def _losses(folder: Path, rows: list[int], vocabulary: HeadGroup) -> dict[str, tuple[Tensor, list[Tensor], list]]:
    """Loss, gradients, and the shapes of what each projection saw, of every form."""
    results = {}
    for form, objective in OBJECTIVES.items():
        kind = "logits" if form == "logits" else "hidden"
        trajectory = make_distillation(
            make_rows(), [make_small(1), make_small(2, num_layers=2, embed_dim=24)], kind=kind
        )
        side, student = make_side(folder, (16, 24), kind=kind, vocabulary=vocabulary), make_small(0)
        seen: list[tuple] = []
        plain = projection_module.F
        projection_module.F = SimpleNamespace(linear=partial(_spy, seen))
        try:
            out = objective(student, trajectory.rows(torch.tensor(rows)), DenseLogprobs(), side)
        finally:
            projection_module.F = plain
        out.loss.backward()
        results[form] = (out.loss.detach(), [p.grad for p in student.parameters()], seen)
    return results


def _on_one_of_four(rank: int, folder: Path) -> dict[str, tuple]:
    """Two data-parallel groups of two ranks that share the heads, a row each."""
    results = _losses(folder, [rank], make_head_group(_ranks(4, rank), 2, VOCAB))
    for _, gradients, _ in results.values():
        for gradient in gradients:
            dist.all_reduce(gradient)
    return results


def test_two_pairs_of_ranks_give_the_gradient_of_one(tmp_path: Path) -> None:
    save_two_teachers(tmp_path)
    ranks = run_ranks(_on_one_of_four, tmp_path, world_size=4, timeout=120)
    whole = _losses(tmp_path, [0, 1, 2, 3], HeadGroup(start=0, stop=VOCAB, group=None))
    for form, (loss, gradients, _) in whole.items():
        torch.testing.assert_close(sum(rank[form][0] for rank in ranks), loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(ranks[3][form][1], gradients, rtol=1e-3, atol=1e-4)


def _on_rank(rank: int, folder: Path) -> dict[str, Any]:
    vocabulary = make_head_group(_ranks(2, rank), 2, VOCAB)
    results = {"bounds": (vocabulary.start, vocabulary.stop)}
    for name, shares in SHARES.items():
        results[name] = _losses(folder, shares[rank], vocabulary)
        for _, gradients, _ in results[name].values():
            for gradient in gradients:
                dist.all_reduce(gradient)
    return results


def test_two_slices_give_the_loss_and_gradient_of_one_head(tmp_path: Path) -> None:
    save_two_teachers(tmp_path)
    ranks = run_ranks(_on_rank, tmp_path)
    assert [rank["bounds"] for rank in ranks] == [(0, 29), (29, 59)]
    for name, shares in SHARES.items():
        whole = _losses(tmp_path, shares[0] + shares[1], HeadGroup(start=0, stop=VOCAB, group=None))
        for form, (loss, gradients, _) in whole.items():
            parts = [rank[name][form] for rank in ranks]
            torch.testing.assert_close(sum(part[0] for part in parts), loss, rtol=1e-5, atol=0)
            for part in parts:  # reduced over the ranks
                torch.testing.assert_close(part[1], gradients, rtol=1e-3, atol=1e-4)
    # Tokens of all ranks of the group, and this rank's slice of the vocabulary: row 1 is teacher 0's one token.
    for rank, width in enumerate((29, 30)):
        seen = ranks[rank]["no row of one teacher"]["hidden"][2]
        assert seen[:2] == [((1, 16), (width, 16)), ((10, 16), (width, 16))]


def _gather_on_rank(rank: int) -> list[Tensor]:
    vocabulary = make_head_group(_ranks(2, rank), 2, 4)
    mine = [torch.tensor([[1.0], [2.0]]), torch.zeros(0, 1)][rank]
    counts = vocabulary.counts(len(mine), torch.device("cpu"))
    results = [torch.tensor(counts)]
    for reduce_gradient in (True, False):
        rows = mine.clone().requires_grad_()
        gathered = vocabulary.gather(rows, counts, reduce_gradient=reduce_gradient)
        (gathered * torch.tensor([[3.0], [5.0]]) * (rank + 1)).sum().backward()
        results += [gathered.detach(), rows.grad]
    return [*results, vocabulary.own(gathered.detach(), counts)]


def test_gathered_rows_get_the_sum_over_slices_or_what_is_complete_already() -> None:
    first, second = run_ranks(_gather_on_rank)
    assert first[0].tolist() == second[0].tolist() == [2, 0]
    for gathered in (first[1], second[1], first[3], second[3]):
        assert gathered.tolist() == [[1.0], [2.0]]
    # The slices say 3 and 5 times 1 and 2; rank 1 has no row.
    assert first[2].tolist() == [[9.0], [15.0]] and first[4].tolist() == [[3.0], [5.0]]
    assert second[2].shape == second[4].shape == (0, 1)
    assert first[5].tolist() == [[1.0], [2.0]] and second[5].shape == (0, 1)


@pytest.mark.parametrize("size", [0, 2, 4])
def test_head_groups_must_divide_the_ranks(size: int) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel: got {size}, .*3"):
        make_head_group(_ranks(3), size, VOCAB)


def test_one_rank_a_head_makes_no_group() -> None:
    vocabulary = make_head_group(_ranks(3), 1, VOCAB)
    assert vocabulary == HeadGroup(start=0, stop=VOCAB, group=None)
    assert vocabulary.counts(5, torch.device("cpu")) == [5]

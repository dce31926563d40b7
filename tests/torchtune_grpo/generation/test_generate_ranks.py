"""Generation on two ranks with sharded parameters, against one process that shards nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtune.modules import TransformerDecoder

from tests.torchtune_grpo.distributed_helpers import run_ranks
from tests.torchtune_grpo.tiny_models import NO_STOP, VOCAB, make_model, make_prompts, responses
from torchtune_grpo.generation import Generate
from torchtune_grpo.logprobs import DenseLogprobs
from torchtune_grpo.training.distributed import Ranks, build_sharded, full_state_dict
from torchtune_grpo.types import PromptBatch

GENERATE = Generate(group_size=3, max_new_tokens=9)
EVERY_TOKEN = tuple(range(VOCAB))
SAME_PROMPT = [7, 7, 3]


def _batches(case: str, rank: int) -> PromptBatch:
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6, 5], SAME_PROMPT] if rank == 0 else [SAME_PROMPT]
    seeds = [5, 6, 7] if rank == 0 else [8]
    stop_ids = {
        "uneven": (1, 4, 7),
        "rank 0 ends at once": EVERY_TOKEN if rank == 0 else NO_STOP,
        "rank 1 ends at once": NO_STOP if rank == 0 else EVERY_TOKEN,
        "all end at once": EVERY_TOKEN,
    }[case]
    return make_prompts(prompts, seeds=seeds, stop_ids=stop_ids)


CASES = ["uneven", "rank 0 ends at once", "rank 1 ends at once", "all end at once"]


def _row_limits(rank: int) -> Tensor:
    """Rank 1's rows end long before rank 0's."""
    return torch.tensor([9, 1, 4, 2, 7, 3, 5, 8, 6] if rank == 0 else [1, 2, 1])


def _sharded(rank: int, kind: str, dp_replicate: int = 1) -> TransformerDecoder:
    ranks = Ranks(device=torch.device("cpu"), rank=rank, world_size=2)
    state_dict = make_model(kind).state_dict
    return build_sharded(lambda: make_model(kind), state_dict, ranks=ranks, dp_replicate=dp_replicate)


def _loss(model: TransformerDecoder, generate: Generate, batch: PromptBatch) -> Tensor:
    return DenseLogprobs()(model, generate(model, batch)).sum()


def _is_sharded(model: TransformerDecoder) -> bool:
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def _on_rank(rank: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for gather in (True, False):
        model = _sharded(rank, "gqa" if gather else "qwen2")
        generate = replace(GENERATE, gather_parameters=gather)
        for case in CASES:
            rollout = generate(model, _batches(case, rank))
            result[f"{gather} {case}"] = responses(rollout), rollout.old_logprobs
            result[f"{gather} {case} sharded"] = _is_sharded(model) and not rollout.old_logprobs.requires_grad
        limited = generate(model, _batches("uneven", rank), row_limits=_row_limits(rank))
        result[f"{gather} limited"] = responses(limited), limited.response_lengths.tolist()
        copies = generate(_sharded(rank, "gqa" if gather else "qwen2", dp_replicate=2), _batches("uneven", rank))
        result[f"{gather} copies"] = responses(copies) == result[f"{gather} uneven"][0]
        parts = replace(generate, max_cached_tokens=20 if rank else 40)(model, _batches("uneven", rank))
        result[f"{gather} parts"] = responses(parts) == result[f"{gather} uneven"][0]
        broken = replace(make_prompts([[3, 1], [4]]), seeds=torch.tensor([1]))  # found out after the prefill
        with pytest.raises(IndexError):
            generate(model, broken)
        attention = model.layers[0].attn
        result[f"{gather} restored"] = (
            _is_sharded(model),
            attention.kv_cache is None and not attention.cache_enabled and "unembed" not in vars(model),
            model.training,
        )
        result[f"{gather} parameters"] = full_state_dict(model)
        _loss(model, generate, _batches("uneven", rank)).backward()
        result[f"{gather} gradient"] = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    return result


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return run_ranks(_on_rank)


def _kind(gather: bool) -> str:
    return "gqa" if gather else "qwen2"


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_sharded_ranks_sample_what_one_process_samples(outcomes: list, case: str, gather: bool) -> None:
    for rank, outcome in enumerate(outcomes):
        tokens, logprobs = outcome[f"{gather} {case}"]
        alone = GENERATE(make_model(_kind(gather)), _batches(case, rank))
        assert tokens == responses(alone)
        torch.testing.assert_close(logprobs, alone.old_logprobs, atol=1e-5, rtol=0)
    if case == "uneven":
        assert outcomes[0][f"{gather} {case}"][0][6:] != outcomes[1][f"{gather} {case}"][0]  # another seed


@pytest.mark.parametrize("gather", [True, False])
def test_ranks_with_other_numbers_of_parts_sample_the_same(outcomes: list, gather: bool) -> None:
    """Three prompts and three parts on rank 0, one of each on rank 1."""
    assert [outcome[f"{gather} parts"] for outcome in outcomes] == [True, True]


@pytest.mark.parametrize("gather", [True, False])
def test_row_limits_end_rows_on_uneven_ranks(outcomes: list, gather: bool) -> None:
    for rank, outcome in enumerate(outcomes):
        tokens, lengths = outcome[f"{gather} limited"]
        alone = GENERATE(make_model(_kind(gather)), _batches("uneven", rank), row_limits=_row_limits(rank))
        assert tokens == responses(alone)
        assert all(length <= limit for length, limit in zip(lengths, _row_limits(rank).tolist(), strict=True))


@pytest.mark.parametrize("gather", [True, False])
def test_whole_copies_on_every_rank_sample_the_same(outcomes: list, gather: bool) -> None:
    """HSDP with as many copies as ranks: nothing is sharded."""
    assert [outcome[f"{gather} copies"] for outcome in outcomes] == [True, True]


@pytest.mark.parametrize("gather", [True, False])
def test_parameters_are_unchanged_and_sharded_again(outcomes: list, gather: bool) -> None:
    before = make_model(_kind(gather)).state_dict()
    after = outcomes[0][f"{gather} parameters"]
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(outcome[f"{gather} {case} sharded"] for outcome in outcomes for case in CASES)


@pytest.mark.parametrize("gather", [True, False])
def test_sharded_model_is_restored_after_an_error(outcomes: list, gather: bool) -> None:
    for outcome in outcomes:
        assert outcome[f"{gather} restored"] == (True, True, True)


@pytest.mark.parametrize("gather", [True, False])
def test_training_after_generation_gives_the_gradient_of_one_process(outcomes: list, gather: bool) -> None:
    model = make_model(_kind(gather))
    for rank in (0, 1):
        (_loss(model, GENERATE, _batches("uneven", rank)) / 2).backward()  # FSDP averages over ranks
    for outcome in outcomes:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                outcome[f"{gather} gradient"][name], parameter.grad, atol=2e-4, rtol=1e-4, msg=name
            )

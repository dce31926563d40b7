"""Sharded models against plain ones: one optimizer step must give the same parameters."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtune.modules import TransformerDecoder

from tests.torchtune_grpo.distributed_helpers import run_ranks
from tests.torchtune_grpo.tiny_models import VOCAB, make_model
from torchtune_grpo.collectives import any_rank
from torchtune_grpo.config import ConfigError
from torchtune_grpo.training.distributed import (
    Ranks,
    build_sharded,
    data_parallel_mesh,
    evaluation_mode,
    fsdp_modules,
    full_state_dict,
    init_ranks,
    parameters_gathered,
    set_gradient_sync,
)

BUILDS = {
    "fsdp": {},
    "hsdp": {"dp_replicate": 2},
    "checkpointed": {"activation_checkpointing": True},
    "untied": {},
    "qwen3": {"activation_checkpointing": True},
}


def _tokens(rank: int, part: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(10 * rank + part))


def _loss(model: TransformerDecoder, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _optimizer(model: TransformerDecoder) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def _ranks(rank: int) -> Ranks:
    return Ranks(device=torch.device("cpu"), rank=rank, world_size=2)


def _plain(name: str, seed: int = 0) -> TransformerDecoder:
    return make_model("qwen3" if name == "qwen3" else "gqa", seed=seed, tied=name != "untied")


def _build(rank: int, name: str = "fsdp") -> TransformerDecoder:
    """Rank 1's weights would be others: only those that rank 0 reads may count."""
    return build_sharded(
        lambda: _plain(name),
        lambda: _plain(name, seed=rank).state_dict(),
        ranks=_ranks(rank),
        **BUILDS[name],
    )


def _one_step(rank: int, name: str) -> dict[str, Any]:
    """State before and after a step that accumulates two micro-batches, on rank 0."""
    model = _build(rank, name)
    before = copy.deepcopy(full_state_dict(model))
    optimizer = _optimizer(model)
    for part in (0, 1):
        set_gradient_sync(model, part == 1)
        (_loss(model, _tokens(rank, part)) / 2).backward()
    optimizer.step()
    return {
        "before": before,
        "after": full_state_dict(model),
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
        "layer": type(model.layers[0]).__name__,
        "local": sum(p.to_local().numel() for p in model.parameters()),
    }


def _bf16_step(rank: int) -> dict[str, Any]:
    """Compute in bf16, from a bf16 file; then an update far below bf16's resolution."""

    def stored() -> dict[str, Tensor]:
        return {k: v.bfloat16() for k, v in make_model("gqa").state_dict().items()}

    model = build_sharded(lambda: make_model("gqa"), stored, ranks=_ranks(rank), compute_dtype=torch.bfloat16)
    seen = []
    model.layers[0].register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    _loss(model, _tokens(rank)).backward()
    gradients = [p.grad.to_local() for p in model.parameters()]
    before = full_state_dict(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(1e-6)
    frozen = build_sharded(
        lambda: make_model("gqa"),
        stored,
        ranks=_ranks(rank),
        compute_dtype=torch.bfloat16,
        trainable=False,
    )
    return {
        "compute": seen,
        "gradients": {g.dtype for g in gradients},
        "beyond bf16": any((g != g.bfloat16()).any() for g in gradients),
        "before": before,
        "after": full_state_dict(model),
        "frozen": {(p.dtype, p.requires_grad) for p in frozen.parameters()},
        "frozen_rope": frozen.layers[0].attn.pos_embeddings.cache.dtype,
    }


def _gathered_elements(rank: int) -> tuple[int, int]:
    """Elements held whole in and after ``parameters_gathered``; rank 1 makes three forwards more in it."""
    model = _build(rank)
    with evaluation_mode(model), parameters_gathered(model):
        whole = sum(p.numel() for p in model.parameters() if not isinstance(p, DTensor))
        for _ in range(1 + 3 * rank):
            model(_tokens(rank))
    dist.barrier()
    after = sum(p.numel() for p in model.parameters() if not isinstance(p, DTensor))
    return whole, after


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return "nothing"


def _on_rank(rank: int) -> dict[str, Any]:
    return {
        **{name: _one_step(rank, name) for name in BUILDS},
        "bf16": _bf16_step(rank),
        "gathered": _gathered_elements(rank),
        "any": [any_rank(rank == 0), any_rank(rank == 1), any_rank(True), any_rank(False)],
        "errors": [_raised(lambda n=n: data_parallel_mesh(_ranks(rank), n)) for n in (3, 0)],
    }


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return run_ranks(_on_rank)


def _plain_step(name: str) -> dict[str, Tensor]:
    model = _plain(name)
    optimizer = _optimizer(model)
    for rank in (0, 1):
        for part in (0, 1):
            (_loss(model, _tokens(rank, part)) / 4).backward()
    optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("name", BUILDS)
def test_build_sharded_step_equals_that_of_one_process(outcomes: list, name: str) -> None:
    start = _plain(name).state_dict()
    expected = _plain_step(name)
    found = outcomes[0][name]
    assert found["before"].keys() == found["after"].keys() == expected.keys()
    for key in expected:
        assert torch.equal(found["before"][key], start[key]), key
        torch.testing.assert_close(found["after"][key], expected[key], atol=1e-6, rtol=1e-5, msg=key)
        assert not torch.allclose(expected[key], start[key], atol=1e-4, rtol=0), key
    assert outcomes[1][name]["after"] == {}  # only rank 0 gets the full state


def test_build_sharded_splits_parameters_over_ranks_and_hsdp_copies_them(outcomes: list) -> None:
    total = sum(p.numel() for p in make_model("gqa").parameters())
    assert [outcome["fsdp"]["local"] for outcome in outcomes] != [total, total]
    assert sum(outcome["fsdp"]["local"] for outcome in outcomes) == total
    assert [outcome["hsdp"]["local"] for outcome in outcomes] == [total, total]
    assert all(outcome[name]["sharded"] for outcome in outcomes for name in BUILDS)


def test_activation_checkpointing_wraps_layers_where_asked(outcomes: list) -> None:
    wrapped = [name for name in BUILDS if "CheckpointWrapper" in outcomes[0][name]["layer"]]
    assert wrapped == ["checkpointed", "qwen3"]


def test_master_weights_keep_updates_that_bf16_would_round_away(outcomes: list) -> None:
    found = outcomes[0]["bf16"]
    assert set(found["compute"]) == {torch.bfloat16}
    assert found["gradients"] == {torch.float32}
    assert found["beyond bf16"]  # the mean of two bf16 gradients, taken in fp32, seldom is a bf16 number
    for name, before in found["before"].items():
        assert before.dtype == torch.float32
        change = (found["after"][name] - before).double()
        torch.testing.assert_close(change, torch.full_like(change, 1e-6), atol=2e-7, rtol=0)


def test_frozen_model_is_stored_in_the_compute_dtype(outcomes: list) -> None:
    assert outcomes[0]["bf16"]["frozen"] == {(torch.bfloat16, False)}
    assert outcomes[0]["bf16"]["frozen_rope"] == torch.float32


def test_parameters_gathered_lets_ranks_run_freely(outcomes: list) -> None:
    total = sum(p.numel() for p in make_model("gqa").parameters())
    assert [outcome["gathered"] for outcome in outcomes] == [(total, 0), (total, 0)]


def test_any_rank_is_the_same_on_every_rank(outcomes: list) -> None:
    assert [outcome["any"] for outcome in outcomes] == [[True, True, True, False]] * 2


def test_dp_replicate_must_divide_the_ranks(outcomes: list) -> None:
    for message, value in zip(outcomes[0]["errors"], (3, 0), strict=True):
        assert message.startswith(f"dp_replicate: got {value}") and "(2)" in message


def test_any_rank_alone_is_the_flag() -> None:
    assert any_rank(True) and not any_rank(False)


def test_fsdp_modules_of_a_plain_model_are_none() -> None:
    assert fsdp_modules(make_model("mha")) == []


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_mode_restores_the_mode_also_after_an_error(training: bool) -> None:
    model = make_model("mha").train(training)
    with pytest.raises(RuntimeError, match="no memory"):
        with evaluation_mode(model):
            assert not model.training and not model.layers[0].training
            assert not torch.is_grad_enabled()
            raise RuntimeError("no memory")
    assert model.training == training and model.layers[0].training == training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("device", ["tpu", "cuda"])
def test_init_ranks_refuses_a_device_that_is_not_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device"):
        init_ranks(device)
    assert not dist.is_initialized()

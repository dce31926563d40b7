"""Packed rows, and heads and packers plugged into the stable recipe, against dense execution."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from dev.packed_logprobs import PackedLogprobs
from dev.shared_prefix import SharedPrefixLogprobs
from tests.dev.shared_prefix.rollouts import SHAPES, dense_rows, gradients, relative_error, shared_rollout, worst_error
from tests.recipes.launch import run_ok, small_config
from tests.torchtune_grpo.tiny_models import make_model
from torchtune_grpo.config import ConfigError
from torchtune_grpo.training.metrics import read_metrics

CAPACITY = 9


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_values_and_gradients_equal_dense_execution(shape: str) -> None:
    rollout, model = shared_rollout(*SHAPES[shape]), make_model("gqa")
    packed, dense = PackedLogprobs(temperature=0.7)(model, rollout), dense_rows(model, rollout, 0.7)
    assert relative_error(packed, dense) <= 1e-5
    assert worst_error(gradients(packed, rollout, model), gradients(dense, rollout, model)) <= 1e-5


def test_packed_rows_do_not_share_a_prompt_that_differs_within_a_group() -> None:
    """Several turns make a group's prompts differ: refused where they are shared, computed here."""
    rollout, model = shared_rollout([3, 3], [2, 4], [0, 0]), make_model("mha")
    rollout.tokens[1, rollout.prompt_width - 2] += 1
    assert relative_error(PackedLogprobs()(model, rollout), dense_rows(model, rollout)) <= 1e-5


@pytest.mark.parametrize("logprobs_fn", [PackedLogprobs(), SharedPrefixLogprobs()])
@pytest.mark.parametrize("shape", ["uneven groups", "interleaved"])
def test_gradients_summed_over_planned_bins_equal_dense_execution(logprobs_fn: Any, shape: str) -> None:
    """The capacity cuts a group in two."""
    rollout, model = shared_rollout(*SHAPES[shape]), make_model("gqa")
    plan = logprobs_fn.plan(rollout, CAPACITY)
    assert 1 < len(plan) < len(rollout)
    bins_of_groups = [set(rollout.groups[rows].tolist()) for rows in plan]
    assert any(one & other for one, other in combinations(bins_of_groups, 2))
    totals = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for rows in plan:
        part = rollout.rows(rows)
        for name, value in gradients(logprobs_fn(model, part), rollout, model, rows.tolist()).items():
            totals[name] += value
    assert worst_error(totals, gradients(dense_rows(model, rollout), rollout, model)) <= 1e-5


@pytest.mark.parametrize("logprobs_fn", [PackedLogprobs(), SharedPrefixLogprobs()])
def test_plan_refuses_a_row_longer_than_a_micro_batch(logprobs_fn: Any) -> None:
    with pytest.raises(ConfigError, match="max_tokens_per_micro_batch: got 7, expected at least 9: row 1"):
        logprobs_fn.plan(shared_rollout(*SHAPES["uneven groups"]), 7)


PACKED = {
    "_component_": "dev.packed_logprobs.PackedLogprobs",
    "head": {"_component_": "dev.chunked_logprobs.FusedLinearHead", "chunk_size": 7},
}


def _metrics(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    run_ok("grpo_full_finetune", small_config("grpo", folder, optimizer={"lr": 1e-2}, total_steps=2, **changes))
    return [line for line in read_metrics(folder / "grpo/metrics.jsonl") if "loss" in line]


def test_grpo_with_packing_and_the_fused_head_gives_the_dense_run_to_rounding(tmp_path: Path) -> None:
    """Two ranks, and so few tokens a micro-batch that groups are cut."""
    dense = _metrics(tmp_path / "dense")
    packed = _metrics(tmp_path / "packed", logprobs=PACKED, max_tokens_per_micro_batch=150)
    assert [line["step"] for line in dense] == [1, 2] and dense[1]["grad_norm"] > 0
    for expected, actual in zip(dense, packed, strict=True):
        for key in ("loss", "grad_norm", "reward", "ratio", "kl_old"):
            assert actual[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key

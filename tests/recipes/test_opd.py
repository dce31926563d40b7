"""On-policy distillation as users run it: ranks, kill and resume, teachers that may and may not change."""

import math
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from benchmarks.forked_ranks import without_clocks
from tests.recipes.launch import run, run_ok, run_until_killed
from tests.recipes.small_opd import RECIPE, config, save_models
from tests.torchtune_grpo.distillation.small_models import node
from torchtune_grpo.training.metrics import read_metrics


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def whole(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on one rank, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole")
    run_ok(RECIPE, config(models, folder), ranks=1)
    return folder


def test_every_promised_metric_is_logged_by_teacher_and_source(whole: Path) -> None:
    lines = [line for line in read_metrics(whole / "opd/metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    names = ("reverse_kl", "reverse_kl_min", "reverse_kl_max", "student_entropy", "teacher_gap")
    groups = ("", "teacher/again+first/", "teacher/second/", "source/growth/", "source/decline/")
    for line in lines:
        seen = [prefix for prefix in groups if f"{prefix}reverse_kl" in line]
        assert seen[0] == "" and len(seen) >= 3  # four prompts a step may all be of one source
        for prefix in seen:
            values = {name: line[f"{prefix}{name}"] for name in names}
            assert all(math.isfinite(value) for value in values.values())
            assert 0 <= values["reverse_kl_min"] <= values["reverse_kl"] <= values["reverse_kl_max"]
        assert line["teacher/again+first/reverse_kl"] == line["source/growth/reverse_kl"]
        for name in ("seconds/teachers", "tokens_per_second/teachers", "success", "grad_norm", "entropy"):
            assert line[name] is not None


def test_two_ranks_that_share_the_heads_give_the_numbers_of_one(whole: Path, models: Path, tmp_path: Path) -> None:
    path = config(models, tmp_path, tensor_parallel=2, teacher_heads="evict")
    said = run_ok(RECIPE, path, ranks=2)
    assert said.count("teacher ") == 2 and f"teacher again+first from {models / 'b'}" in said
    one, two = (read_metrics(folder / "opd/metrics.jsonl") for folder in (whole, tmp_path))
    compared = {"reverse_kl", "reverse_kl_max", "source/growth/reverse_kl", "loss", "grad_norm", "teacher_gap"}
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for name in compared & set(a):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), (a["step"], name)


def test_killed_run_resumes_bit_for_bit_with_its_teachers_in_another_order(
    whole: Path, models: Path, tmp_path: Path
) -> None:
    path = config(models, tmp_path)
    checkpoints = tmp_path / "opd/checkpoints"
    run_until_killed(RECIPE, path, checkpoints / "step_00000002", ranks=1)
    assert not (checkpoints / "step_00000004").exists()
    cfg = OmegaConf.load(path)
    cfg.teachers = dict(reversed(cfg.teachers.items()))
    cfg.routing.sources = dict(reversed(cfg.routing.sources.items()))
    OmegaConf.save(cfg, path)
    assert f"resuming from {checkpoints}/step_0000000" in run_ok(RECIPE, path, ranks=1)
    assert without_clocks(tmp_path / "opd") == without_clocks(whole / "opd")
    states = [load_file(f / "opd/checkpoints/step_00000004/hf/model.safetensors") for f in (tmp_path, whole)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def test_resume_with_a_teacher_replaced_is_refused_with_both_lists(whole: Path, models: Path, tmp_path: Path) -> None:
    teachers = {"second": node(models / "a", embed_dim=24), "again": node(models / "c", num_layers=2)}
    path = config(models, tmp_path, teachers=teachers, output_dir=str(whole / "opd"))
    done = run(RECIPE, path, ranks=1)
    assert done.returncode != 0
    message = done.stderr.split("Config error:")[1]
    assert "dropped or replaced" in message and "step_00000004" in message
    saved, current = message.split("the config names")
    assert f"0: {models / 'a'}" in saved and f"1: {models / 'b'}" in saved
    assert f"0: {models / 'a'}" in current and f"1: {models / 'c'}" in current


def test_off_policy_twin_learns_from_the_worked_solutions(models: Path, tmp_path: Path) -> None:
    objective = {
        "_component_": "torchtune_grpo.distillation.FullVocabulary",
        "fused": False,
        "payload": {"_component_": "torchtune_grpo.distillation.Logits", "dtype": "fp32"},
    }
    given = {"_component_": "torchtune_grpo.distillation.GivenCompletions", "max_new_tokens": 30}
    run_ok(RECIPE, config(models, tmp_path, objective=objective, generate=given, total_steps=2), ranks=1)
    lines = [line for line in read_metrics(tmp_path / "opd/metrics.jsonl") if "loss" in line]
    assert [line["success"] for line in lines] == [1.0, 1.0] and all(line["reverse_kl"] > 0 for line in lines)


def test_sampled_tokens_with_rewards_one_untagged_teacher_and_several_updates(models: Path, tmp_path: Path) -> None:
    path = config(
        models,
        tmp_path,
        teachers={"only": node(models / "a", embed_dim=24)},
        routing=None,
        objective={"_component_": "torchtune_grpo.distillation.SampledToken", "reward_coefficient": 0.5},
        generate={"_component_": "torchtune_grpo.generation.Generate", "group_size": 2, "max_new_tokens": 8},
        epochs_per_rollout=2,
        minibatches_per_epoch=2,
    )
    run_ok(RECIPE, path, ranks=1)
    lines = [line for line in read_metrics(tmp_path / "opd/metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [4]
    assert lines[0]["ratio"] != 1.0 and lines[0]["teacher/only/teacher_gap"] == lines[0]["teacher_gap"]

"""The scripts themselves: what they would submit, and what they refuse. No Slurm needed."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from torchtune_grpo.training.preemption import PREEMPTED

ROOT = Path(__file__).parents[2]
RUN, PIPELINE = "recipes/slurm/run.sbatch", "recipes/slurm/pipeline.sh"
GRPO = ["recipes/grpo_full_finetune_distributed.py", "--config", "configs/tiny/grpo.yaml"]


def bash(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    return subprocess.run(["bash", *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("script", [RUN, PIPELINE])
def test_script_parses_and_may_be_executed(script: str) -> None:
    assert bash("-n", script).returncode == 0
    assert os.access(ROOT / script, os.X_OK)


def test_script_and_recipes_mean_the_same_code() -> None:
    assert f"\nPREEMPTED={PREEMPTED} " in (ROOT / RUN).read_text()


@pytest.mark.parametrize("recipe", ["sft_warmup", "grpo_full_finetune", "opd_full_finetune", "evaluate"])
def test_one_script_runs_every_recipe(recipe: str) -> None:
    arguments = [f"recipes/{recipe}_distributed.py", "--config", f"configs/tiny/{recipe.split('_full')[0]}.yaml"]
    done = bash(RUN, "--dry-run", "--ntasks-per-node=2", *arguments)
    assert done.returncode == 0, done.stderr
    assert all(shlex.split(line)[-3:] == arguments for line in done.stdout.splitlines())


def test_dry_run_prints_both_commands_with_arguments_as_given() -> None:
    overrides = ["seed=1", "prompt.template=User: {question} it's <think>", "optimizer.betas=[0.9, 0.99]"]
    options = ["--nodes=2", "--gpus-per-node=h100:4", "--cpus-per-gpu=6"]
    done = bash(RUN, "--dry-run", *options, *GRPO, *overrides)
    assert done.returncode == 0, done.stderr
    sbatch, srun = (shlex.split(line) for line in done.stdout.splitlines())
    assert sbatch == ["sbatch", *options, RUN, *GRPO, *overrides]
    assert srun[-len(GRPO + overrides) :] == GRPO + overrides
    expected = {"--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=6"}
    assert expected | {"--output=runs/slurm/%j_rank_%t.log"} <= set(srun)


def test_ranks_per_node_go_before_gpus() -> None:
    done = bash(RUN, "--dry-run", "--gpus-per-node=8", "--ntasks-per-node=2", *GRPO)
    assert {"--nodes=1", "--ntasks=2", "--ntasks-per-node=2"} <= set(done.stdout.split())


def test_pipeline_chains_weights_and_jobs() -> None:
    done = bash(PIPELINE, "--dry-run", "configs/tiny", "runs/x", "--nodes=2", "--", "seed=1")
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in done.stderr.splitlines()]
    assert [line[0] for line in lines] == ["sbatch", "srun"] * 3
    sft, grpo, evaluate = lines[::2]
    assert all({"--nodes=2", "seed=1"} <= set(stage) for stage in (sft, grpo, evaluate))
    assert "output_dir=runs/x/sft_warmup" in sft and not any(word.startswith("--dependency") for word in sft)
    assert {"weights=runs/x/sft_warmup", "output_dir=runs/x/grpo"} < set(grpo)
    assert {"weights=runs/x/grpo", "output_dir=runs/x/evaluate"} < set(evaluate)
    assert "--dependency=afterok:JOB_ID_OF_sft_warmup" in grpo
    assert "--dependency=afterok:JOB_ID_OF_grpo" in evaluate


@pytest.mark.parametrize(("arguments", "message"), [([], "usage: "), (["configs", "x"], "has no sft_warmup.yaml")])
def test_pipeline_refuses(arguments: list[str], message: str) -> None:
    done = bash(PIPELINE, "--dry-run", *arguments)
    assert done.returncode != 0 and message in done.stderr and not done.stdout


def test_pipeline_stops_at_a_stage_that_cannot_be_submitted(tmp_path: Path) -> None:
    calls, sbatch = tmp_path / "calls", tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\necho call >> {calls}\nexit 1\n")
    sbatch.chmod(0o755)
    done = bash("-c", f"PATH={tmp_path}:$PATH {PIPELINE} configs/tiny {tmp_path}/out")
    assert done.returncode == 1
    assert calls.read_text() == "call\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (GRPO, "no allocation: submit this script with sbatch, or pass --dry-run"),
        (["--dry-run", "recipes/nothing.py"], "RECIPE: got 'recipes/nothing.py', expected recipes/NAME.py"),
        (["--dry-run"], "RECIPE: got ''"),
    ],
)
def test_run_refuses(arguments: list[str], message: str) -> None:
    done = bash(RUN, *arguments)
    assert done.returncode == 2 and message in done.stderr

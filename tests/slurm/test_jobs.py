"""Jobs on a real Slurm of two nodes: rendezvous, warnings, requeue, failure, the pipeline."""

import json
from pathlib import Path

import pytest

from tests.recipes.launch import small_config
from tests.slurm.cluster import Cluster
from torchtune_grpo.training.metrics import read_metrics

pytestmark = pytest.mark.slurm
RUN, PROBE = "recipes/slurm/run.sbatch", "tests/slurm/probe.py"


def test_ranks_of_two_nodes_get_one_rendezvous_and_the_arguments(cluster: Cluster) -> None:
    arguments = ["exit=0", "rank=0", 'prompt.template=it\'s {a} "$b"', "betas=[0.9, 0.99]"]
    job = cluster.submit("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2", RUN, PROBE, *arguments)
    assert cluster.finish(job) == "COMPLETED", cluster.report(job)
    ranks = [json.loads(cluster.rank_log(job, rank).splitlines()[0]) for rank in range(4)]
    assert [(rank["RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    shared = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "WANDB_MODE": "offline"}
    for rank in ranks:
        assert shared.items() <= rank.items()
        assert int(rank["MASTER_PORT"]) == 20000 + int(job) % 10000
        assert rank["arguments"] == arguments


def test_failing_rank_fails_the_job_with_its_code(cluster: Cluster) -> None:
    job = cluster.submit("--nodes=2", RUN, PROBE, "exit=3", "rank=1")
    assert cluster.finish(job) == "FAILED", cluster.report(job)
    assert (cluster.field(job, "ExitCode"), cluster.field(job, "Restarts")) == ("3:0", "0")


def test_job_warned_before_its_handlers_saves_and_comes_back(cluster: Cluster) -> None:
    job = cluster.submit("--nodes=2", RUN, PROBE, "boot=2")
    cluster.wait_for_line(job, "RANK", rank=1)
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@300 does
    assert cluster.finish(job) == "COMPLETED", cluster.report(job)
    assert cluster.field(job, "Restarts") == "1"
    for rank in range(2):
        lines = cluster.rank_log(job, rank).splitlines()
        assert [line for line in lines if "RANK" not in line] == ["ready", "saved", "ready", "resumed"]


def test_job_preempted_before_its_handlers_comes_back(cluster: Cluster) -> None:
    job = cluster.submit("--nodes=2", RUN, PROBE, "boot=60")
    cluster.wait_for_line(job, "RANK", rank=1)
    urgent = cluster.submit("--nodes=2", "--exclusive", "--partition=urgent", "--wrap=true")
    assert cluster.finish(urgent) == "COMPLETED"
    cluster.wait(lambda: cluster.field(job, "Restarts") == "1", "the job to come back", job)
    assert "the ranks ended with code 143" in (cluster.logs / f"{job}.log").read_text()
    cluster.run("scancel", job)


def test_cancelled_job_does_not_come_back(cluster: Cluster) -> None:
    job = cluster.submit("--nodes=2", RUN, PROBE)
    cluster.wait_for_line(job, "ready", rank=1)
    cluster.run("scancel", job)
    assert cluster.finish(job) == "CANCELLED", cluster.report(job)
    cluster.wait_for_line(job, "saved")
    assert cluster.field(job, "Restarts") == "0"


def test_pipeline_survives_a_warning_and_runs_in_order(cluster: Cluster, tmp_path: Path) -> None:
    steps = 300
    small_config("sft_warmup", tmp_path, dataset={"size": 8 * steps}, total_steps=steps, evaluate_every_n_steps=steps)
    small_config("grpo", tmp_path)
    small_config("evaluate", tmp_path)
    options = ["--nodes=2", f"--output={cluster.logs}/%j.log", "--", "num_threads=1"]
    sft, grpo, evaluate = cluster.pipeline(str(tmp_path), str(tmp_path), *options)
    cluster.wait_for_line(sft, "step 2 ")
    cluster.run("scancel", "--batch", "--signal=USR1", sft)
    states = [cluster.finish(job) for job in (sft, grpo, evaluate)]
    assert states == ["COMPLETED"] * 3, "\n".join(map(cluster.report, (sft, grpo, evaluate)))
    assert [cluster.field(job, "Restarts") for job in (sft, grpo, evaluate)] == ["1", "0", "0"]
    losses = [line["step"] for line in read_metrics(tmp_path / "sft_warmup/metrics.jsonl") if "loss" in line]
    assert losses == list(range(1, steps + 1))
    assert cluster.field(sft, "EndTime") <= cluster.field(grpo, "StartTime")
    assert cluster.field(grpo, "EndTime") <= cluster.field(evaluate, "StartTime")
    assert (tmp_path / "evaluate/results.json").exists()


def test_pipeline_ends_when_a_stage_fails(cluster: Cluster, tmp_path: Path) -> None:
    for name in ("sft_warmup", "grpo", "evaluate"):
        small_config(name, tmp_path)
    jobs = cluster.pipeline(str(tmp_path), str(tmp_path), f"--output={cluster.logs}/%j.log", "--", "lerning_rate=1")
    assert [cluster.finish(job) for job in jobs] == ["FAILED", "CANCELLED", "CANCELLED"]
    assert cluster.field(jobs[0], "ExitCode") == "2:0"

"""The continued run is the run that would have been: from any step, on other ranks, after any kill, but not on other
data."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.recipes import small_opd
from tests.recipes.launch import ROOT, environment, run, small_config, wait_for
from torchtune_grpo.data import Dataset, tiny_dataset

EVERY_STEP = {"every_n_steps": 1, "keep_last": 99, "keep_best": 0}
# Four updates a rollout; samples, evaluations and checkpoints fall between them.
OFTEN = {"checkpoints": EVERY_STEP, "evaluate_every_n_steps": 3}
UPDATES = {"epochs_per_rollout": 2, "minibatches_per_epoch": 2, "total_steps": 8, "log_samples_every_n_steps": 3}
FOUR_UPDATES = OFTEN | UPDATES


def script(*arguments: str) -> dict[str, Any] | list[Any]:
    """The JSON that a module of this repository prints last; it must end with status 0."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Of every case what differed from the undisturbed run; one process, as most of the time is imports."""
    folder = tmp_path_factory.mktemp("resume")
    grpo = FOUR_UPDATES | {"max_sampling_rounds": 2, "prompts_per_step": 8}
    models = small_opd.save_models(folder / "models")
    sft = OFTEN | {"dataset": {"size": 32}, "total_steps": 9, "log_every_n_steps": 3}  # four steps an epoch
    cases = {  # recipe, config, steps to resume from, ranks that run and that resume
        "sft": ("sft_warmup", small_config("sft_warmup", folder / "sft", **sft), [4, 5], 2, 2),
        "grpo": ("grpo_full_finetune", small_config("grpo", folder / "grpo", **grpo), [1, 3, 6], 2, 2),
        "opd": (small_opd.RECIPE, small_opd.config(models, folder / "opd", **FOUR_UPDATES), [2, 5], 2, 2),
        "sft, fewer ranks": ("sft_warmup", small_config("sft_warmup", folder / "sft_fewer", **sft), [5], 2, 1),
        "grpo, fewer ranks": ("grpo_full_finetune", small_config("grpo", folder / "fewer", **grpo), [5], 2, 1),
        "opd, more ranks": (small_opd.RECIPE, small_opd.config(models, folder / "more", **FOUR_UPDATES), [1], 1, 2),
    }
    plan = [
        {"recipe": recipe, "config": str(config), "steps": steps, "ranks": ranks, "resuming": resuming}
        for recipe, config, steps, ranks, resuming in cases.values()
    ]
    (folder / "plan.json").write_text(json.dumps(plan))
    found = script("tests.recipes.resume_everywhere", str(folder / "plan.json"))
    return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("case", ["sft", "grpo", "opd", "grpo, fewer ranks", "opd, more ranks", "sft, fewer ranks"])
def test_run_continues_from_any_step_as_if_it_had_never_ended(differences: dict[str, list[str]], case: str) -> None:
    assert differences[case] == []


def test_killed_runs_end_like_the_undisturbed_one() -> None:
    summary = script("benchmarks.kill_test", "--kills", "6", "--steps", "12", "--seed", "1")
    assert summary["kills"] == 6 and summary["differences"] == summary["unexpected_ends"] == []


def dataset_of_size_in(path: str) -> Dataset:
    """Rows that change when the file does, as a data file's would."""
    return tiny_dataset(split="train", size=int(Path(path).read_text()), seed=0)


def test_signal_saves_and_ends_with_75_and_the_run_continues_on_the_same_data_only(tmp_path: Path) -> None:
    config = small_config("grpo", tmp_path, total_steps=100000, checkpoints={"every_n_steps": 100000})
    cfg, size = OmegaConf.load(config), tmp_path / "size"
    cfg.dataset = {"_component_": "tests.recipes.test_resume.dataset_of_size_in", "path": str(size)}
    OmegaConf.save(cfg, config)
    size.write_text("32")
    alone = [sys.executable, "recipes/grpo_full_finetune_distributed.py", "--config", str(config)]
    started = subprocess.Popen(alone, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    wait_for(tmp_path / "grpo/samples.jsonl", started)  # open: training is about to begin
    metrics = tmp_path / "grpo/metrics.jsonl"
    while metrics.stat().st_size == 0:
        time.sleep(0.01)
    started.send_signal(signal.SIGUSR1)
    said = started.communicate(timeout=60)[0]
    assert started.returncode == 75
    (saved,) = (tmp_path / "grpo/checkpoints").iterdir()
    step = int(saved.name.removeprefix("step_"))
    assert f"preempted: the checkpoint of step {step} is saved; the same command with resume=auto continues" in said
    size.write_text("31")
    done = run("grpo_full_finetune", config, ranks=1)
    assert done.returncode != 0
    assert "Config error:\ndataset: got 31 rows, BLAKE2" in done.stderr and "was saved with 32 rows" in done.stderr

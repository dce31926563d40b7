"""Launches recipes the way users do, on configs cut down to seconds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

ROOT = Path(__file__).parents[2]
SMALL_TASK = {"dataset": {"size": 7}, "batch_size": 3, "generate": {"max_new_tokens": 6}}


def small_config(name: str, folder: Path, **changes: Any) -> Path:
    """``configs/tiny/<name>.yaml`` with a smaller model and data, ``changes`` merged in, written to ``folder``."""
    cfg = OmegaConf.load(ROOT / f"configs/tiny/{name}.yaml")
    small: dict[str, Any] = {
        "model": {
            "num_layers": 2,
            "num_heads": 2,
            "num_kv_heads": 1,
            "embed_dim": 16,
            "intermediate_dim": 32,
        },
        "evaluation": {task: SMALL_TASK for task in cfg.evaluation},
        "output_dir": str(folder / name),
    }
    if name == "sft_warmup":
        small |= {
            "dataset": {"size": 64},
            "examples_per_step": 8,
            "total_steps": 4,
            "lr_scheduler": {"num_warmup_steps": 1},
            "log_every_n_steps": 1,
        }
    if name == "grpo":
        small |= {
            "weights": None,
            "dataset": {"size": 32},
            "prompts_per_step": 4,
            "total_steps": 4,
            "max_tokens_per_micro_batch": 400,
            "generate": {"group_size": 3, "max_new_tokens": 8},
            # Untrained completions are never right; their lengths differ, which gives the groups a spread.
            "rewards": {
                "weights": {"length": 1.0},
                "fns": {
                    "length": {
                        "_component_": "torchtune_grpo.rewards.LengthPenalty",
                        "max_response_tokens": 8,
                    }
                },
            },
        }
    if name == "opd":
        for part in (*cfg.dataset.datasets, *cfg.evaluation.heldout.dataset.datasets):
            part.size = 40
        small |= {
            "prompts_per_step": 4,
            "max_prompt_tokens": 34,
            "total_steps": 4,
            "max_tokens_per_micro_batch": 100,
            "generate": {"max_new_tokens": 8},
            "lr_scheduler": {"num_warmup_steps": 1},
        }
    path = folder / f"{name}.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.merge(cfg, small, changes), path)
    return path


def command(recipe: str, config: Path, *overrides: str, ranks: int = 2) -> list[str]:
    tune = Path(sys.executable).with_name("tune")
    launcher = [str(tune), "run", "--nproc_per_node", str(ranks), f"recipes/{recipe}_distributed.py"]
    return [*launcher, "--config", str(config), *overrides]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


def run(recipe: str, config: Path, *overrides: str, ranks: int = 2) -> subprocess.CompletedProcess:
    """Runs a recipe from the root of the repository; does not raise for its exit status."""
    return subprocess.run(
        command(recipe, config, *overrides, ranks=ranks),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_ok(recipe: str, config: Path, *overrides: str, ranks: int = 2) -> str:
    """Runs a recipe that must succeed; returns its stdout."""
    done = run(recipe, config, *overrides, ranks=ranks)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def wait_for(path: Path, process: subprocess.Popen, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, f"the run ended before {path.name} appeared"
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.02)


def run_until_killed(recipe: str, config: Path, appears: Path, *, ranks: int = 2) -> None:
    """Starts a recipe and kills all its processes as soon as the path ``appears`` is there."""
    process = subprocess.Popen(
        command(recipe, config, ranks=ranks),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(appears, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

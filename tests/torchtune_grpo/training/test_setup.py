import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from tests.torchtune_grpo.distributed_helpers import run_ranks
from torchtune_grpo.config import Component, ConfigError, load, to_dict
from torchtune_grpo.data import tiny_tokenizer
from torchtune_grpo.models import tiny_llama
from torchtune_grpo.models.weights import scratch_hf_config, write_hf_folder
from torchtune_grpo.training import setup
from torchtune_grpo.training.distributed import Ranks
from torchtune_grpo.training.setup import (
    RecipeConfig,
    TrainingConfig,
    build_policy,
    check_model,
    hf_exporter,
    make_output_dir,
    per_rank,
)
from torchtune_grpo.training.train_state import MAY_CHANGE, check_resumed_config, check_resumed_identity

TOKENIZER = tiny_tokenizer()
MODEL = {
    "_component_": "torchtune_grpo.models.tiny_llama",
    "vocab_size": 60,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 2,
    "embed_dim": 16,
    "intermediate_dim": 24,
    "max_seq_len": 32,
}


def _ranks(world_size: int, rank: int = 0) -> Ranks:
    return Ranks(device=torch.device("cpu"), rank=rank, world_size=world_size)


def _config(weights: Path | None = None, **changes: Any) -> RecipeConfig:
    return load(
        OmegaConf.create(
            {
                "output_dir": "unused",
                "seed": 4,
                "tokenizer": {"_component_": "torchtune_grpo.data.tiny_tokenizer"},
                "prompt": {"_component_": "torchtune_grpo.data.Prompt"},
                "model": MODEL | changes,
                "weights": None if weights is None else str(weights),
                "rewards": {"_component_": "torchtune_grpo.rewards.FormatReward"},
            }
        ),
        RecipeConfig,
    )


def _model(**changes: int) -> nn.Module:
    torch.manual_seed(1)
    return tiny_llama(**{k: v for k, v in (MODEL | changes).items() if k != "_component_"})


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = _model()
    config = scratch_hf_config(model, bos_id=None, eos_id=TOKENIZER.eos_id, pad_id=TOKENIZER.pad_id)
    write_hf_folder(tmp_path / "weights", model.state_dict(), config, torch.float32)
    return tmp_path / "weights"


def test_check_model_accepts_a_model_that_fits(weights: Path) -> None:
    check_model(_config(), TOKENIZER, longest=32)
    check_model(_config(weights), TOKENIZER, longest=32)


def test_check_model_refuses_a_vocabulary_below_the_tokenizers() -> None:
    with pytest.raises(ConfigError, match=f"model: .*{TOKENIZER.vocab_size - 1}.*{TOKENIZER.vocab_size}"):
        check_model(_config(vocab_size=TOKENIZER.vocab_size - 1), TOKENIZER, longest=32)
    check_model(_config(vocab_size=TOKENIZER.vocab_size), TOKENIZER, longest=32)


def test_check_model_refuses_sequences_beyond_the_rotary_table() -> None:
    with pytest.raises(ConfigError, match="model.max_seq_len: got 32, expected at least 33"):
        check_model(_config(), TOKENIZER, longest=33)


def test_check_model_refuses_weights_of_another_model(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="(?s)weights: .*mlp.w1.weight.*24.*28"):
        check_model(_config(weights, intermediate_dim=28), TOKENIZER, longest=32)
    with pytest.raises(ConfigError, match="weights: .*no folder"):
        check_model(_config(tmp_path / "absent"), TOKENIZER, longest=32)


def test_weights_are_resolved_once_whatever_is_saved_meanwhile(weights: Path, tmp_path: Path) -> None:
    def checkpoint(step: int) -> Path:
        folder = tmp_path / f"run/checkpoints/step_{step:08d}"
        shutil.copytree(weights, folder / "hf")
        (folder / "state.json").write_text("{}")
        return folder / "hf"

    first = checkpoint(1)
    cfg = _config(tmp_path / "run")
    assert cfg.weights_folder == first
    checkpoint(2)
    assert cfg.weights_folder == first
    assert _config().weights_folder is None


def test_per_rank_divides() -> None:
    assert per_rank(12, _ranks(4), "prompts_per_step") == 3


@pytest.mark.parametrize("total", [0, -4, 6])
def test_per_rank_refuses_what_does_not_divide(total: int) -> None:
    with pytest.raises(ConfigError, match=f"prompts_per_step: got {total}, .*4"):
        per_rank(total, _ranks(4), "prompts_per_step")


def _on_rank(rank: int, weights: Path, folder: Path) -> dict[str, Any]:
    """Builds from weights and from scratch, and exports both."""
    ranks = _ranks(2, rank)
    for name, cfg in {"loaded": _config(weights), "scratch": _config()}.items():
        (folder / name).mkdir(exist_ok=True)
        model = build_policy(cfg, ranks)
        write = hf_exporter(cfg, model, TOKENIZER, ranks)()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)  # what is written is what was, although training goes on
        write(folder / name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
    frozen = build_policy(_config(weights), ranks, trainable=False)
    return {
        "trainable": all(p.requires_grad for p in model.parameters()),
        "frozen": not any(p.requires_grad for p in frozen.parameters()),
    }


def test_policies_on_two_ranks_load_and_export(weights: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # here, or every rank would import it

    outcomes = run_ranks(_on_rank, weights, tmp_path)
    assert outcomes == [{"trainable": True, "frozen": True}] * 2
    tokens = torch.tensor([[5, 1, 7, 30, 2]])
    torch.manual_seed(4)  # the config's seed
    scratch = tiny_llama(**{k: v for k, v in MODEL.items() if k != "_component_"})
    for name, model in {"loaded": _model(), "scratch": scratch}.items():
        hf = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        with torch.no_grad():
            difference = (model(tokens) - hf(tokens).logits).abs().max()
        assert difference < 1e-4, name
        assert hf.config.eos_token_id == TOKENIZER.eos_id
        text = "Tom has 7 apples. </think> <answer> 18 </answer>"
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert tokenizer.encode(text, add_special_tokens=False) == TOKENIZER.encode(text)
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "float32"


TRAINING = {
    "output_dir": "unused",
    "tokenizer": {"_component_": "torchtune_grpo.data.tiny_tokenizer"},
    "prompt": {"_component_": "torchtune_grpo.data.Prompt"},
    "model": MODEL,
    "weights": None,
    "rewards": {"_component_": "torchtune_grpo.rewards.FormatReward"},
    "dataset": {"_component_": "torchtune_grpo.data.tiny_dataset", "split": "sft", "size": 4},
    "total_steps": 4,
    "max_tokens_per_micro_batch": 100,
    "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1},
    "checkpoints": {"_component_": "torchtune_grpo.training.checkpoints.CheckpointManager", "every_n_steps": 2},
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("total_steps", 0),
        ("total_steps", -4),
        ("max_tokens_per_micro_batch", 0),
        ("evaluate_every_n_steps", 0),
        ("clip_grad_norm", 0.0),
        ("clip_grad_norm", -1.0),
        ("max_skipped_updates", 0),
        ("num_threads", 0),
        ("output_dir", ""),
    ],
)
def test_training_config_refuses_numbers_out_of_range(key: str, value: object) -> None:
    assert load(OmegaConf.create(TRAINING), TrainingConfig).total_steps == 4
    with pytest.raises(ConfigError, match=f"^{key}: got"):
        load(OmegaConf.create(TRAINING | {key: value}), TrainingConfig)


def test_training_config_refuses_a_best_metric_that_no_evaluation_reports() -> None:
    best = TRAINING["checkpoints"] | {"keep_best": 1, "best_metric": "eval/heldout/pass@1"}
    with pytest.raises(ConfigError, match="checkpoints.best_metric"):
        load(OmegaConf.create(TRAINING | {"checkpoints": best}), TrainingConfig)


def test_resumed_config_may_change_how_long_to_run_but_not_what() -> None:
    saved = {"seed": 1, "total_steps": 4, "loss": {"clip_low": 0.2}}
    check_resumed_config(saved, saved | {"total_steps": 9}, Path("step"))
    with pytest.raises(ConfigError) as error:
        check_resumed_config(saved, saved | {"total_steps": 9, "loss": {"clip_low": 0.3}, "seed": 2}, Path("step"))
    assert "seed: got 2" in str(error.value) and "loss: got {'clip_low': 0.3}" in str(error.value)
    assert "total_steps" not in str(error.value)
    assert {"optimizer", "model", "dataset", "seed"}.isdisjoint(MAY_CHANGE)


def test_resumed_run_may_change_what_bounds_a_rollouts_memory() -> None:
    saved = {"generate": {"group_size": 8, "max_cached_tokens": None}}
    check_resumed_config(saved, {"generate": {"group_size": 8, "max_cached_tokens": 4096}}, Path("step"))
    with pytest.raises(ConfigError, match="^generate: got"):
        check_resumed_config(saved, {"generate": {"group_size": 4, "max_cached_tokens": None}}, Path("step"))


@pytest.mark.parametrize("key", ["weights", "dataset"])
def test_resumed_run_with_other_weights_or_rows_is_refused(key: str) -> None:
    """``weights`` may name the folder of a run that has gone on since."""
    saved = {"weights": "/sft/step_2/hf", "dataset": "32 rows"}
    check_resumed_identity(saved, saved, Path("step"))
    with pytest.raises(ConfigError, match=f"^{key}: got other, but step was saved with {saved[key]}"):
        check_resumed_identity(saved, saved | {key: "other"}, Path("step"))


def test_output_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cfg = _config()
    cfg.output_dir = str(tmp_path / "file")
    with pytest.raises(ConfigError, match="^output_dir: got"):
        make_output_dir(cfg, _ranks(1))


def test_output_dir_of_a_live_run_is_refused_and_that_of_a_dead_one_is_not(tmp_path: Path, monkeypatch) -> None:
    cfg = _config()
    cfg.output_dir = str(tmp_path)
    code = (
        "import fcntl, os, sys; lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); fcntl.flock(lock, fcntl.LOCK_EX);"
        "os.write(lock, b'process 7 on node3'); print('locked', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "locked\n"
    monkeypatch.setattr(setup, "LEASE_S", -1.0)
    with pytest.raises(ConfigError, match=r"^output_dir: got .*, to which a live run writes \(process 7 on node3\)"):
        make_output_dir(cfg, _ranks(1))
    monkeypatch.setattr(setup, "LEASE_S", 60.0)
    monkeypatch.setattr(setup.time, "sleep", lambda seconds: (other.kill(), other.communicate()))  # another node's
    make_output_dir(cfg, _ranks(1))
    assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        make_output_dir(cfg, _ranks(1))


def test_output_dir_that_cannot_be_locked_is_used_with_a_warning(tmp_path: Path, monkeypatch) -> None:
    def unsupported(*_: int) -> None:
        raise OSError(95, "Operation not supported")

    cfg = _config()
    cfg.output_dir = str(tmp_path)
    monkeypatch.setattr(setup.fcntl, "flock", unsupported)
    with pytest.warns(UserWarning, match="output_dir cannot be locked .*Operation not supported"):
        make_output_dir(cfg, _ranks(1))
    assert (tmp_path / ".lock").read_text() == ""  # it claims nothing


class Refuses:
    """A component that cannot work with a certain model."""

    def __init__(self, max_layers: int) -> None:
        raise AssertionError("only its class is asked")

    @staticmethod
    def check_model(model: nn.Module) -> None:
        raise ConfigError(f"logprobs: refused {len(model.layers)} layers")


@dataclass(kw_only=True)
class _ConfigWithLogprobs(RecipeConfig):
    logprobs: Component


def test_check_model_asks_the_components_of_the_config() -> None:
    node = {"_component_": f"{__name__}.Refuses", "max_layers": 2}
    values = {**to_dict(_config()), "logprobs": node}
    with pytest.raises(ConfigError, match="logprobs: refused 1 layers"):
        check_model(load(OmegaConf.create(values), _ConfigWithLogprobs), TOKENIZER, longest=8)

"""The stable recipe with the experiment's node in its config: launched by ``tune run``, the same run to rounding."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.recipes.launch import ROOT, run, run_ok, small_config
from torchtune_grpo.training.metrics import read_metrics

LOGPROBS = OmegaConf.load(ROOT / "configs/dev/grpo_shared_prefix.yaml").logprobs
# The logprobs component computes policy, old and reference log-probabilities here, in several micro-batches.
EVERY_USE: dict[str, Any] = {
    "old_logprobs": {"_component_": "torchtune_grpo.old_logprobs.RecomputedLogprobs"},
    "activation_checkpointing": True,
    "optimizer": {"lr": 1e-2},
    "max_tokens_per_micro_batch": 200,
}
LOSS = {
    "_component_": "torchtune_grpo.losses.SumLoss",
    "terms": [
        {"_component_": "torchtune_grpo.losses.ClippedSurrogate"},
        {"_component_": "torchtune_grpo.losses.KLToReference", "coefficient": 0.1},
    ],
}


@pytest.fixture
def installed_dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package named ``dev`` on the import path, ahead of site-packages."""
    package = tmp_path / "installed/dev"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not the dev of this repository')\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=":")


def _config(folder: Path, **changes: Any) -> Path:
    config = small_config("grpo", folder, **EVERY_USE, **changes)
    cfg = OmegaConf.load(config)
    cfg.loss = LOSS  # not merged into the tiny config's, whose clip bounds would stay
    OmegaConf.save(cfg, config)
    return config


@pytest.mark.usefixtures("installed_dev")
def test_grpo_gives_the_dense_run_to_rounding_whatever_dev_is_installed(tmp_path: Path) -> None:
    run_ok("grpo_full_finetune", _config(tmp_path / "dense"))
    run_ok("grpo_full_finetune", _config(tmp_path / "shared", logprobs=LOGPROBS))
    expected, actual = (read_metrics(tmp_path / name / "grpo/metrics.jsonl") for name in ("dense", "shared"))
    assert [line["step"] for line in expected if "loss" in line] == [1, 2, 3, 4]
    assert max(line.get("kl_ref", 0.0) for line in expected) > 1e-4
    for one, other in zip(expected, actual, strict=True):
        assert one.keys() == other.keys()
        for name in {"reward", "success", "loss", "grad_norm", "response_length", "kl_ref", "kl_old", "ratio"} & set(
            one
        ):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), (one["step"], name)
    assert "dev.shared_prefix" in (tmp_path / "shared/grpo/config.yaml").read_text()


def test_model_that_cannot_share_is_refused_at_setup(tmp_path: Path) -> None:
    model = {"_component_": "torchtune.models.llama3_2.llama3_2", "attn_dropout": 0.1}
    done = run("grpo_full_finetune", small_config("grpo", tmp_path, logprobs=LOGPROBS, model=model), ranks=1)
    assert done.returncode != 0
    assert "Config error:\nmodel: got attn_dropout 0.1 in layer 0" in done.stderr

"""A folder with one finished run, in which every bad input of this suite is tried: nothing of it may change."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.bad_input.entry import run_recipe, tree
from tests.recipes.launch import small_config

GSM8K_ROW = {"question": "Tom has 3 apples and finds 4 more. How many apples does Tom have now?", "answer": "#### 7"}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output_dir of an SFT run of two steps; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    config = small_config("sft_warmup", folder, total_steps=2, checkpoints={"every_n_steps": 1, "keep_last": 2})
    done = run_recipe("sft_warmup", config, load_weights=True)
    assert done.code == 0, done.out + done.err
    return folder / "sft_warmup"


@pytest.fixture(scope="session")
def arena(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Path:
    """``run/``, the output_dir of an earlier SFT run, and ``fresh/``, both with a file of the user's; ``configs/``, one
    good config for each recipe and for each kind of data, with one of the two (``fresh`` for grpo and opd);
    ``work/``, the folder to launch from."""
    folder = tmp_path_factory.mktemp("arena")
    shutil.copytree(trained, folder / "run")
    (folder / "run/notes.txt").write_text("mine")
    (folder / "fresh").mkdir()
    (folder / "fresh/notes.txt").write_text("mine")
    (folder / "work").mkdir()
    configs = folder / "configs"
    common = {"output_dir": str(folder / "run")}
    fresh = {"output_dir": str(folder / "fresh")}
    teacher = {"weights": str(trained)}
    small_config("sft_warmup", configs, **common)
    small_config("grpo", configs, **fresh, weights=str(trained))
    small_config("evaluate", configs, **common, weights=str(trained))
    small_config("opd", configs, **fresh, **teacher, teachers={"growth": teacher, "decline": teacher})
    (folder / "rows.jsonl").write_text((json.dumps(GSM8K_ROW) + "\n") * 16)
    _replace(configs, "sft_warmup", "gsm8k", dataset=_component("data.gsm8k_dataset", path=str(folder / "rows.jsonl")))
    _replace(configs, "sft_warmup", "math", dataset=_component("data.math_dataset", path=str(folder / "rows.jsonl")))
    _replace(configs, "evaluate", "tokenizer", tokenizer=_component("data.Tokenizer", path="nowhere"))
    return folder


def _component(name: str, **keys: str) -> dict[str, str]:
    return {"_component_": f"torchtune_grpo.{name}", **keys}


def _replace(configs: Path, base: str, name: str, **nodes: dict[str, str]) -> None:
    cfg = OmegaConf.load(configs / f"{base}.yaml")
    for key, node in nodes.items():
        cfg[key] = node
    OmegaConf.save(cfg, configs / f"{name}.yaml")


@pytest.fixture
def configs(arena: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of good configs, the working directory an empty one. Whatever the test runs, ``arena`` stays as it
    is, byte by byte: the earlier run and its checkpoints, the user's file, the launching folder."""
    monkeypatch.chdir(arena / "work")
    before = tree(arena)
    yield arena / "configs"
    assert tree(arena) == before

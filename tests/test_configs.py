"""Every YAML in configs/ is complete: the recipe that its header names accepts it, and every component builds."""

import importlib.util
import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torchtune.config
from omegaconf import OmegaConf

from torchtune_grpo.config import Component, instantiate, load
from torchtune_grpo.data.tiny import TOKENIZER_FOLDER

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
NAMES = [str(path.relative_to(ROOT)) for path in CONFIGS]
GSM8K_ROWS = [{"question": f"What is {i} plus {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(1, 21)]
MATH_ROWS = [
    {"problem": f"Find ${i}^2$.", "solution": rf"It is $\boxed{{{i * i}}}$.", "answer": str(i * i)} for i in (3, 4)
]


def recipe_of(path: Path) -> ModuleType:
    """The recipe that the header's command launches, loaded from its file."""
    (recipe,) = set(re.findall(r"recipes/(\w+)\.py", path.read_text()))
    spec = importlib.util.spec_from_file_location(f"recipe_{recipe}", ROOT / "recipes" / f"{recipe}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def local_files(tmp_path: Path) -> dict[str, str]:
    """What stands in for the hub: component -> path."""
    paths = {"tokenizer": str(TOKENIZER_FOLDER)}
    for name, rows in (("gsm8k", GSM8K_ROWS), ("math", MATH_ROWS)):
        paths[name] = str(tmp_path / f"{name}.jsonl")
        Path(paths[name]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def localized(node: Any, paths: dict[str, str]) -> Any:
    """The node with every path to the hub or to downloaded weights replaced."""
    if isinstance(node, list):
        return [localized(item, paths) for item in node]
    if not isinstance(node, dict):
        return node
    copy = {key: localized(value, paths) for key, value in node.items()}
    target = str(copy.get("_component_"))
    for component, name in {
        "gsm8k_dataset": "gsm8k",
        "math_dataset": "math",
        "data.Tokenizer": "tokenizer",
    }.items():
        if target.endswith(component):
            copy["path"] = paths[name]
    if "log_dir" in copy:
        copy["log_dir"] = str(Path(paths["gsm8k"]).parent)
    return Component(copy, node.path) if isinstance(node, Component) else copy


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_tune_validate_passes(path: Path) -> None:
    assert torchtune.config.validate(OmegaConf.load(path)) is None


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_header_command_names_this_file(path: Path) -> None:
    commands = re.findall(r"^# +tune run (.+)$", path.read_text(), flags=re.MULTILINE)
    assert commands
    for command in commands:
        assert f"--config {path.relative_to(ROOT)}" in command and "--nproc_per_node" in command


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_recipe_accepts_config_and_every_component_builds(path: Path, local_files: dict[str, str]) -> None:
    recipe = recipe_of(path)
    cfg = load(OmegaConf.load(path), recipe.Config)
    runtime = {
        "params": [torch.nn.Parameter(torch.zeros(2))],
        "output_dir": "unused",
        "temperature": 1.0,
        "num_training_steps": 100,
    }
    built = set()
    for field in fields(cfg):
        node = localized(getattr(cfg, field.name), local_files)
        wanted = {name: runtime[name] for name in field.metadata.get("runtime", ()) if name != "optimizer"}
        if field.name == "lr_scheduler" and node is not None:
            wanted["optimizer"] = torch.optim.AdamW(runtime["params"])
        nodes = node if isinstance(node, list) else list(node.values()) if _is_mapping_of_nodes(node) else [node]
        with torch.device("meta" if field.name in ("model", "teachers") else "cpu"):
            for item in nodes:
                if isinstance(item, Component):
                    assert instantiate(item, **wanted) is not None
                    built.add(field.name)
    assert {"model", "tokenizer", "prompt", "rewards", "evaluation"} <= built


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_model_fits_tokenizer_and_longest_sequence(path: Path) -> None:
    cfg = OmegaConf.load(path)
    with torch.device("meta"):
        models = [instantiate(cfg.model), *(instantiate(teacher).model for teacher in cfg.get("teachers", {}).values())]
    tasks = list(cfg.evaluation.values())
    longest = max(task.max_prompt_tokens + task.generate.max_new_tokens for task in tasks)
    if "generate" in cfg:
        longest = max(longest, cfg.max_prompt_tokens + cfg.generate.max_new_tokens)
    assert all(longest <= model.max_seq_len for model in models)


def test_every_recipe_has_a_tiny_config() -> None:
    recipes = {path.stem for path in (ROOT / "recipes").glob("*_distributed.py")}
    covered = {
        name
        for path in (ROOT / "configs/tiny").glob("*.yaml")
        for name in re.findall(r"recipes/(\w+)\.py", path.read_text())
    }
    assert covered == recipes


def _is_mapping_of_nodes(node: Any) -> bool:
    return isinstance(node, dict) and not isinstance(node, Component)

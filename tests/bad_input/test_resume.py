"""Checkpoints that cannot be resumed: none, damaged, or of another run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bad_input.entry import run_recipe, tree

NEWEST = "step_00000002"


def state(**changes: object) -> Callable[[Path], None]:
    """Keys of state.json set, or taken out where they are None."""

    def change(checkpoint: Path) -> None:
        path = checkpoint / "state.json"
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return change


def written(content: bytes) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / "state.json").write_bytes(content)


DAMAGED = {
    "no_json": written(b"{"),
    "empty": written(b""),
    "binary": written(b"\xff\xfe"),
    "list": written(b"[]"),
    "no_step": state(step=None),
    "step_text": state(step="2"),
    "no_config": state(config=None),
    "config_list": state(config=[1]),
    "no_extra": state(extra=None),
    "no_world_size": state(world_size=None),
}


@pytest.fixture
def run(trained: Path, tmp_path: Path, configs: Path) -> Path:
    """A copy of the earlier run, to be damaged."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_checkpoint_is_refused(configs: Path, run: Path, name: str) -> None:
    DAMAGED[name](run / "checkpoints" / NEWEST)
    before = tree(run)
    resume = f"resume={run / 'checkpoints' / NEWEST}"
    outcome = run_recipe("sft_warmup", configs / "sft_warmup.yaml", f"output_dir={run}", resume)
    outcome.assert_refused("resume: ", NEWEST)
    assert "state.json" in outcome.err
    assert tree(run) == before


@pytest.mark.parametrize(
    "path", ["nowhere", "{run}", "{run}/checkpoints", "{run}/notes.txt", "''", '"a\\0b"', "a" * 300]
)
def test_path_that_is_no_checkpoint_is_refused(configs: Path, arena: Path, path: str) -> None:
    override = f"resume={path.replace('{run}', str(arena / 'run'))}"
    run_recipe("sft_warmup", configs / "sft_warmup.yaml", override).assert_refused("resume: got ", "expected 'auto'")


@pytest.mark.parametrize("resume", ["null", "{run}/checkpoints/step_00000001"])
def test_run_among_checkpoints_that_it_does_not_continue_is_refused(configs: Path, arena: Path, resume: str) -> None:
    override = f"resume={resume.replace('{run}', str(arena / 'run'))}"
    outcome = run_recipe("sft_warmup", configs / "sft_warmup.yaml", override)
    outcome.assert_refused("resume: got ", f"output_dir already holds {arena / 'run/checkpoints' / NEWEST}")


@pytest.mark.parametrize("recipe", ["grpo", "opd"])
def test_checkpoint_of_another_recipe_is_refused(configs: Path, arena: Path, recipe: str) -> None:
    outcome = run_recipe(recipe, configs / f"{recipe}.yaml", f"output_dir={arena / 'run'}")
    outcome.assert_refused(NEWEST)
    assert "examples_per_step" in outcome.err or "without teachers" in outcome.err


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optimizer.lr=1e-9", "optimizer: got "),
        ("seed=1", "seed: got 1, but"),
        ("model.num_layers=3", "model: got "),
        ("examples_per_step=4", "examples_per_step: got 4, but"),
        ("dtype=bf16", "dtype: got bf16, but"),
    ],
)
def test_resume_as_another_run_is_refused(configs: Path, override: str, key: str) -> None:
    outcome = run_recipe("sft_warmup", configs / "sft_warmup.yaml", override)
    assert any(line.startswith(key) for line in outcome.err.splitlines())
    outcome.assert_refused(NEWEST, "was saved with")

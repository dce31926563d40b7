import dataclasses
import sys
import textwrap
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from torchtune_grpo.config import (
    Component,
    ConfigError,
    component,
    instantiate,
    load,
    to_yaml,
)

PARTS = """
from __future__ import annotations
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

class Judge(Protocol):
    def __call__(self, text: str) -> float: ...

@dataclass(frozen=True, kw_only=True)
class Sampler:
    group_size: int
    temperature: float = 1.0
    top_k: int | None = None
    stop: Sequence[str] = ()
    mode: Literal["greedy", "random"] = "random"
    folder: Path | None = None
    pad_id: int = -1

    def __post_init__(self):
        if self.group_size < 2:
            raise ValueError(f"group_size: got {self.group_size}, expected at least 2")

@dataclass(frozen=True, kw_only=True)
class Mixture:
    judges: list[Judge]
    weights: dict[str, float]
    betas: tuple[float, float] = (0.9, 0.99)

def exact(partial: bool = False): return ("exact", partial)
def anything(**options): return options
def stranger(x: NoSuchName, y: int = 0): return x
def implicit(x: int = None): return x
def opened(path: str): return open(path)
NUMBER = 3
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema:
    output_dir: str
    seed: int = 0
    lr: float = 1e-3
    compile: bool = False
    sampler: Component = component(runtime=("pad_id",))
    mixture: Component | None = None
    judges: list[Component] = component(default=[])

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed: got {self.seed}, expected 0 or more")


GOOD = {"output_dir": "runs/a", "sampler": {"_component_": "parts_of_user.Sampler", "group_size": 4}}


@pytest.fixture(autouse=True)
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module of the user's own in it."""
    (tmp_path / "parts_of_user.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "parts_of_user", raising=False)
    return tmp_path


def faults(changes: str, schema: type = Schema) -> list[str]:
    """The lines of the error for GOOD merged with a YAML text."""
    with pytest.raises(ConfigError) as caught:
        load(OmegaConf.merge(GOOD, OmegaConf.create(textwrap.dedent(changes))), schema)
    return str(caught.value).splitlines()


def test_load_returns_typed_values_with_interpolations_resolved():
    cfg = load(OmegaConf.merge(GOOD, {"output_dir": "runs/${seed}", "seed": 7, "lr": 1}), Schema)
    assert (cfg.output_dir, cfg.seed, cfg.lr, cfg.mixture, cfg.judges) == ("runs/7", 7, 1, None, [])
    assert isinstance(cfg.sampler, Component) and cfg.sampler.path == "sampler"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ("sede: 1", "sede: unknown key; did you mean 'seed'?"),
        ("temperature: 0.5", "temperature: unknown key; it belongs in sampler"),
        ("sampler: {lr: 0.1}", "sampler.lr: unknown key; it belongs in the top level"),
        ("sampler: {temprature: 0.5}", "sampler.temprature: unknown key; did you mean 'temperature'?"),
        ("seed: 1.0", "seed: got the float 1.0, expected an int; write 1"),
        ("seed: true", "seed: got the bool True, expected an int"),
        ("lr: true", "lr: got the bool True, expected a float"),
        ("compile: 1", "compile: got the int 1, expected a bool"),
        ("seed: null", "seed: got null, expected an int"),
        ("output_dir: 3", "output_dir: got the int 3, expected a str"),
        (
            "judges: ['???']",
            "judges[0]: got nothing (???), expected a Component (a mapping with _component_)",
        ),
        ("sampler: {group_size: 4.5}", "sampler.group_size: got the float 4.5, expected an int"),
        ("sampler: {top_k: 0.5}", "sampler.top_k: got the float 0.5, expected an int or null"),
        ("sampler: {stop: 'end'}", "sampler.stop: got the string 'end', expected a Sequence[str]"),
        ("sampler: {stop: [1]}", "sampler.stop[0]: got the int 1, expected a str"),
        (
            "sampler: {mode: greddy}",
            "sampler.mode: got the string 'greddy', expected one of 'greedy', 'random'; did you mean 'greedy'?",
        ),
        ("sampler: {pad_id: 0}", "sampler.pad_id: this value comes from the recipe: remove the key"),
        (
            "mixture: 3",
            "mixture: got the int 3, expected a Component (a mapping with _component_) or null",
        ),
        (
            "judges: {_component_: parts_of_user.exact}",
            "judges: got the component parts_of_user.exact, expected a list[torchtune_grpo.config.Component]",
        ),
        (
            "judges: [{_component_: parts_of_user.exact, partial: 'yes'}]",
            "judges[0].partial: got the string 'yes', expected a bool",
        ),
        (
            "judges: [{_component_: parts_of_user.exakt}]",
            "judges[0]._component_: cannot import 'parts_of_user.exakt': "
            "No module named 'parts_of_user.exakt'; 'parts_of_user' is not a package; did you mean 'exact'?",
        ),
        (
            "judges: [{_component_: parts_of_user.NUMBER}]",
            "judges[0]._component_: got 'parts_of_user.NUMBER', a int, expected a class or function",
        ),
        (
            "judges: [{_component_: ../parts.exact}]",
            "judges[0]._component_: got the string '../parts.exact', expected a dotpath such as package.module.name",
        ),
    ],
)
def test_load_names_the_fault_and_the_remedy(changes: str, line: str):
    assert faults(changes) == [line]


@pytest.mark.parametrize("key", ["lr", "sampler.temperature"])
def test_load_says_that_a_quoted_number_is_a_string(key: str):
    changes = OmegaConf.create({})
    OmegaConf.update(changes, key, "1e-6")
    assert faults(OmegaConf.to_yaml(changes)) == [
        f"{key}: got the string '1e-6', expected a float; it was read as a string: write the number without quotes"
    ]


def test_load_reports_all_faults_of_all_depths_together():
    lines = faults("""
        sede: 1
        mixture:
          _component_: parts_of_user.Mixture
          judges: [{_component_: parts_of_user.exact, partail: true}, exact]
          weights: {exact: heavy}
          betas: [0.9]
    """)
    assert lines == [
        "sede: unknown key; did you mean 'seed'?",
        "mixture.judges[0].partail: unknown key; did you mean 'partial'?",
        "mixture.judges[1]: got the string 'exact', expected a Judge (a mapping with _component_)",
        "mixture.weights.exact: got the string 'heavy', expected a float",
        "mixture.betas: got the list [0.9], expected a tuple[float, float]",
    ]


def test_load_reports_missing_keys_of_the_schema_and_of_components():
    with pytest.raises(ConfigError) as caught:
        load(OmegaConf.create({"sampler": {"_component_": "parts_of_user.Sampler"}}), Schema)
    assert str(caught.value).splitlines() == [
        "sampler.group_size: missing, expected an int",
        "output_dir: missing, expected a str",
    ]


def test_load_reports_a_component_that_lacks_a_runtime_argument():
    assert faults("sampler: {_component_: parts_of_user.exact, group_size: 4}") == [
        "sampler.group_size: unknown key",
        "sampler._component_: parts_of_user.exact takes no 'pad_id', which the recipe passes to it",
    ]


def test_load_reports_an_interpolation_that_leads_nowhere():
    (line,) = faults("output_dir: ${nowhere}")
    assert line.startswith("output_dir: this value cannot be resolved") and "nowhere" in line


def test_load_lets_the_schema_refuse_contradictions():
    assert faults("seed: -1") == ["seed: got -1, expected 0 or more"]


@pytest.mark.parametrize(
    "node",
    [
        {"_component_": "parts_of_user.anything", "x": {"y": ["any", 1]}},
        {"_component_": "parts_of_user.implicit", "x": None},
        {"_component_": "parts_of_user.stranger", "x": "annotation unknown"},
        {
            "_component_": "parts_of_user.Sampler",
            "group_size": 2,
            "folder": "a/b",
            "top_k": None,
            "temperature": 1,
        },
        {"_component_": "torch.optim.AdamW", "params": [], "lr": 1e-3, "betas": [0.9, 0.95], "fused": True},
    ],
)
def test_load_accepts_what_annotations_allow_or_do_not_tell(node: dict):
    assert load(OmegaConf.create({**GOOD, "judges": [node]}), Schema).judges == [node]


def test_load_checks_torch_components_too():
    node = "{_component_: torch.optim.AdamW, params: [], lr: '1e-4', weigth_decay: 0.1}"
    lines = faults(f"judges: [{node}]")
    assert len(lines) == 2
    assert lines[0].startswith("judges[0].lr: got the string '1e-4', expected a float or")
    assert lines[1] == "judges[0].weigth_decay: unknown key; did you mean 'weight_decay'?"


def test_instantiate_builds_children_first_and_runtime_outermost():
    node = {
        "_component_": "parts_of_user.anything",
        "child": {"_component_": "parts_of_user.exact"},
        "many": [{"_component_": "parts_of_user.exact", "partial": True}, 5],
        "plain": {"key": 1},
    }
    built = instantiate(OmegaConf.create(node), pad_id=9, plain="runtime wins")
    assert built == {
        "child": ("exact", False),
        "many": [("exact", True), 5],
        "plain": "runtime wins",
        "pad_id": 9,
    }
    assert instantiate(None) is None


def test_instantiate_prefixes_a_refusal_with_the_key():
    cfg = load(OmegaConf.merge(GOOD, {"sampler": {"group_size": 1}}), Schema)
    with pytest.raises(ConfigError, match="^sampler: group_size: got 1, expected at least 2$"):
        instantiate(cfg.sampler, pad_id=0)


def test_instantiate_makes_a_missing_file_a_config_error():
    cfg = load(OmegaConf.merge(GOOD, {"mixture": {"_component_": "parts_of_user.opened", "path": "none"}}), Schema)
    with pytest.raises(ConfigError, match="^mixture: .*No such file or directory: 'none'"):
        instantiate(cfg.mixture)


def test_instantiate_refuses_a_node_without_component():
    with pytest.raises(ConfigError, match="got a mapping with lr, expected a mapping with _component_"):
        instantiate({"lr": 1})


def test_instantiate_prefers_the_working_directory_to_what_is_installed(user_folder: Path):
    (user_folder / "installed").mkdir()
    (user_folder / "installed" / "shadowed_parts.py").write_text("def which(): return 'installed'")
    (user_folder / "shadowed_parts.py").write_text("def which(): return 'mine'")
    sys.path[:0] = [str(user_folder / "installed")]
    sys.path.append(str(user_folder))
    assert instantiate({"_component_": "shadowed_parts.which"}) == "mine"


def test_to_yaml_is_read_back_to_an_equal_config():
    cfg = load(OmegaConf.merge(GOOD, {"lr": 1e-6, "judges": [{"_component_": "parts_of_user.exact"}]}), Schema)
    again = load(OmegaConf.create(to_yaml(cfg)), Schema)
    assert again == cfg and again.lr == 1e-6

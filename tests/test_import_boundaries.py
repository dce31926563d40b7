"""Imports point one way: recipes -> torchtune_grpo -> torchtune, dev -> torchtune_grpo, and never back."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRIVATE_MODULE = ROOT / "torchtune_grpo/models/internals.py"


def imported(path: Path) -> set[str]:
    """Every dotted name that a file imports, ``from a import b`` as ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("torchtune_grpo", {"recipes", "dev", "tests", "benchmarks"}),
        ("recipes", {"recipes", "dev", "tests", "benchmarks"}),
        ("dev", {"recipes", "tests", "benchmarks"}),
    ],
)
def test_imports_never_point_back(folder: str, forbidden: set[str]) -> None:
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(folder)
        for name in imported(path)
        if name.split(".")[0] in forbidden
    }
    assert not wrong


def test_private_torchtune_names_sit_in_one_module() -> None:
    private = re.compile(r"torchtune(\..*)?\._")
    users = {
        path
        for folder in ("torchtune_grpo", "recipes", "dev", "benchmarks")
        for path in sources(folder)
        for name in imported(path)
        if private.match(name)
    }
    assert users == {PRIVATE_MODULE}


def test_private_attributes_of_attention_are_used_in_one_module() -> None:
    folders = ("torchtune_grpo", "recipes", "dev", "benchmarks")
    users = {path for folder in folders for path in sources(folder) if "_attention_call" in path.read_text()}
    assert users == {PRIVATE_MODULE}


def test_project_names_no_machine_and_no_folder_outside_it() -> None:
    # The one fixture that may look beside the checkout, and this file, which spells the pattern.
    allowed = {ROOT / "tests/conftest.py", Path(__file__)}
    pattern = re.compile(r"\.\./shared|(?<![\w.])/(?:home|root|Users)/\w")
    suffixes = {".py", ".md", ".yaml", ".toml", ".sh", ".sbatch", ""}
    wrong = [
        str(path.relative_to(ROOT))
        for folder in ("torchtune_grpo", "recipes", "configs", "dev", "benchmarks", "tests", ".ci")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in suffixes and path not in allowed and pattern.search(path.read_text())
    ]
    assert not wrong


def test_dev_is_named_by_configs_alone() -> None:
    pattern = re.compile(r"\bdev\.\w+\.|[\"']dev\.")
    naming = {
        path for folder in ("torchtune_grpo", "recipes") for path in sources(folder) if pattern.search(path.read_text())
    }
    assert not naming
    assert any("_component_: dev." in path.read_text() for path in (ROOT / "configs").rglob("*.yaml"))

"""Fixtures for every test."""

import os
from pathlib import Path

import pytest

SHARED_VARIABLE = "TORCHTUNE_GRPO_SHARED"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of graded cases, real data and real models that lies beside some checkouts.

    It is ``$TORCHTUNE_GRPO_SHARED``, else ``../shared`` beside the checkout; where there is none the test is
    skipped, except under CI=true with the variable set, where a missing folder is a fault.
    """
    named = os.environ.get(SHARED_VARIABLE)
    folder = Path(named) if named else Path(__file__).parents[2] / "shared"
    if folder.is_dir():
        return folder
    if named and os.environ.get("CI") == "true":
        pytest.fail(f"{SHARED_VARIABLE}={named}: no such folder")
    pytest.skip(f"no folder {folder}: set {SHARED_VARIABLE} to run this test")

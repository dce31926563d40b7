"""The cluster that the tests of this folder submit to, started once."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing_programs


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Skips where Slurm or munge is not installed (Debian: slurm-wlm, munge)."""
    if missing := missing_programs():
        pytest.skip(f"no {', '.join(missing)}: install slurm-wlm and munge to run this test")
    # Not pytest's folder: munge wants its socket where any user may go, at a short path.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        running = Cluster(folder)
        try:
            running.start()
            yield running
        finally:
            running.stop()

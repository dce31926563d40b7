"""One rank fails while the other waits for it in a collective: both end, with its message."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

FAULTY = """
import os, signal, time
from dataclasses import dataclass

import torch

from torchtune_grpo.collectives import all_reduce
from torchtune_grpo.entry import recipe_entry
from torchtune_grpo.failures import time_limit
from torchtune_grpo.training.distributed import init_ranks, shut_down

def fail(fault):
    if fault == "raises":
        raise KeyError("one is out")
    if fault == "hangs":
        with time_limit(0.2, "fns.mine"):
            time.sleep(1000)
    os.kill(os.getpid(), signal.SIGKILL)

@dataclass(kw_only=True)
class Schema:
    fault: str
    failing: int

@recipe_entry(Schema)
def main(cfg: Schema) -> None:
    ranks = init_ranks("cpu", num_threads=1)
    print("pid", os.getpid(), flush=True)
    all_reduce(torch.ones(1))
    if ranks.rank == cfg.failing:
        fail(cfg.fault)
    all_reduce(torch.ones(1))
    shut_down()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "config.yaml").write_text("fault: none\nfailing: 9\n")
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **more}


def plain_ranks(folder: Path, *overrides: str) -> list[tuple[int, str]]:
    """Two ranks without torchrun, as srun starts them: each one's exit status and stderr, all within two minutes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "faulty.py", "--config", "config.yaml", *overrides],
            cwd=folder,
            env=environment(**common, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


def test_a_rank_that_raises_ends_the_run_under_tune_run(folder: Path) -> None:
    tune = [str(Path(sys.executable).with_name("tune")), "run", "--nproc_per_node", "2", "faulty.py"]
    done = subprocess.run(
        [*tune, "--config", "config.yaml", "fault=raises", "failing=1"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    message, root_cause = done.stderr.split("Root Cause")
    assert message.count("Error:\nKeyError: 'one is out'\n(rank 1; ") == 1
    assert "rank      : 1 " in root_cause and "KeyError: 'one is out'" in root_cause
    pids = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("pid")]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_that_raises_ends_plain_ranks_and_rank_0_says_it(folder: Path) -> None:
    (status_0, said_0), (status_1, said_1) = plain_ranks(folder, "fault=raises", "failing=1")
    assert status_0 == status_1 == 1
    assert said_0.rstrip().splitlines()[-3:-1] == ["Error:", "KeyError: 'one is out'"]
    assert "Traceback" in said_1 and "Error:\n" not in said_1


def test_a_rank_0_that_hangs_ends_plain_ranks(folder: Path) -> None:
    (status_0, said_0), (status_1, said_1) = plain_ranks(folder, "fault=hangs", "failing=0")
    assert status_0 == status_1 == 1
    line = FAULTY.splitlines().index("            time.sleep(1000)") + 1
    assert "fns.mine: got no result within 0.2 s, stopped at" in said_0 and f"faulty.py:{line}\n" in said_0
    assert "Error:\n" not in said_1


def test_a_rank_0_that_is_killed_ends_plain_ranks(folder: Path) -> None:
    (status_0, _), (status_1, said_1) = plain_ranks(folder, "fault=dies", "failing=0")
    assert (status_0, status_1) == (-9, 1)
    assert "Error:\nanother rank left without a word" in said_1 or "Error:\nlost the connection to rank 0" in said_1

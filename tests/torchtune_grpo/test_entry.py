import errno
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from torchtune_grpo.collectives import RankError
from torchtune_grpo.config import ConfigError
from torchtune_grpo.entry import explain, recipe_entry
from torchtune_grpo.failures import RunError


@dataclass(kw_only=True)
class Schema:
    lr: float = 1e-3
    seed: int = 0


def run_entry(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str, error: BaseException | None = None):
    (folder / "config.yaml").write_text("lr: 0.5\n")
    monkeypatch.setattr(sys, "argv", ["recipe", "--config", str(folder / "config.yaml"), *overrides])
    seen = []

    @recipe_entry(Schema)
    def recipe_main(cfg: Schema) -> None:
        seen.append(cfg)
        if error is not None:
            raise error

    recipe_main()
    return seen


def test_recipe_entry_applies_command_line_overrides(monkeypatch, tmp_path):
    (cfg,) = run_entry(monkeypatch, tmp_path, "lr=1e-6", "seed=8")
    assert cfg == Schema(lr=1e-6, seed=8)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=high", "lr: got the string 'high', expected a float"),
        ("seed", "--config and key=value overrides: Command-line overrides must be"),
    ],
)
def test_recipe_entry_prints_one_message_and_exits_with_2(monkeypatch, tmp_path, capsys, override: str, message: str):
    with pytest.raises(SystemExit) as stopped:
        run_entry(monkeypatch, tmp_path, override)
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith(f"Config error:\n{message}") and "Traceback" not in error


@pytest.mark.parametrize(
    ("error", "status", "first", "traceback"),
    [
        (ConfigError("seed: got 13"), 2, "seed: got 13", False),
        (RunError("step 3: lower optimizer.lr"), 1, "step 3: lower optimizer.lr", False),
        (KeyError("x"), 1, "KeyError: 'x'", True),
    ],
)
def test_recipe_entry_shows_a_traceback_only_where_the_message_is_not_enough(
    monkeypatch, tmp_path, capsys, error: BaseException, status: int, first: str, traceback: bool
):
    for always in (False, True):
        monkeypatch.setenv("TORCHTUNE_GRPO_TRACEBACK", "1" if always else "0")
        with pytest.raises(SystemExit) as stopped:
            run_entry(monkeypatch, tmp_path, error=error)
        said = capsys.readouterr().err
        assert stopped.value.code == status
        assert f"rror:\n{first}\n(rank 0; " in said
        assert ("Traceback" in said) is (traceback or always)


def test_recipe_entry_lets_an_exit_code_through(monkeypatch, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        run_entry(monkeypatch, tmp_path, error=SystemExit(75))
    assert stopped.value.code == 75


def test_recipe_entry_tells_torchrun_why(monkeypatch, tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit):
        run_entry(monkeypatch, tmp_path, error=RunError("step 3: lower optimizer.lr"))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert "step 3: lower optimizer.lr" in failure.message["message"]


def _too_large() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "python"])
def test_want_of_memory_names_the_keys_that_lower_it_and_the_phase(kind: str):
    error: BaseException = MemoryError()
    if kind == "cpu":
        with pytest.raises(RuntimeError) as caught:
            _too_large()
        error = caught.value
    elif kind == "cuda":
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has\nmore lines")
    error.add_note("phase update")
    message, status, enough = explain(error)
    assert status == 1 and enough
    assert message.startswith("Error:\nout of memory: ") and "more lines" not in message
    for text in ("max_tokens_per_micro_batch", "generate.max_cached_tokens", "(rank 0, phase update; "):
        assert text in message


def test_a_full_disk_needs_no_traceback():
    message, _, enough = explain(OSError(errno.ENOSPC, "No space left on device", "out/x"))
    assert enough and "no room left on the disk" in message and "'out/x'" in message
    assert not explain(OSError(errno.EIO, "Input/output error"))[2]


def test_an_error_of_all_ranks_is_not_put_down_to_one():
    assert "(rank" not in explain(RankError("rewards: rank 1: fns.mine: bad"))[0]

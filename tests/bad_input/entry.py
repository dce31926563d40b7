"""Runs programs of the project as commands inside this process, where a start costs tenths of a second, not several.

``recipes/X.py`` is run as ``__main__`` with a command line, as ``tune run`` on one rank does. What it prints is
captured, an exception that it lets out is printed with its traceback and ends it with 1, as in an interpreter.
"""

import hashlib
import io
import os
import runpy
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ROOT = Path(__file__).parents[2]
RECIPES = {
    name: ROOT / f"recipes/{name}{'' if name in ('evaluate', 'sft_warmup') else '_full_finetune'}_distributed.py"
    for name in ("sft_warmup", "grpo", "opd", "evaluate")
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended: exit status and the two streams."""

    code: int
    out: str
    err: str

    @property
    def first_line(self) -> str:
        """The first line of the error itself, after the words that announce it."""
        _, announced, message = self.err.partition("Config error")
        return message.partition(":")[2].strip().partition("\n")[0] if announced else self.err.partition("\n")[0]

    def assert_refused(self, *expected: str) -> None:
        """The command failed, its first line holds every text of ``expected``, and no traceback was shown."""
        shown = self.out + self.err
        assert "Traceback" not in shown, shown[-3000:]
        assert self.code != 0, shown[-3000:]
        for text in expected:
            assert text in self.first_line, f"{text!r} not in {self.first_line!r}"
        assert len(self.first_line) < 1000 and self.first_line.isprintable()


class WeightsLoad(BaseException):
    """The run got as far as loading weights; no fault that shows earlier may get there."""


def run_recipe(name: str, config: Path, *overrides: str, load_weights: bool = False) -> Outcome:
    """A recipe on one rank. Unless ``load_weights``, the first attempt to load some ends it with a traceback."""
    with _as_alone(), _no_weights() if not load_weights else patch.dict({}):
        return run_program(RECIPES[name], "--config", str(config), *overrides)


def run_program(program: Path | str, *arguments: str) -> Outcome:
    """A script by its file, or a module of the package by its name, with a command line."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    run = runpy.run_path if isinstance(program, Path) else runpy.run_module
    with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "argv", [str(program), *arguments]):
        warnings.filterwarnings("ignore", message=".*found in sys.modules")  # pytest puts the filters back
        try:
            run(str(program), run_name="__main__")
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            if isinstance(stop.code, str):
                err.write(stop.code + "\n")
        except BaseException:
            code = 1
            err.write(traceback.format_exc())
    return Outcome(code=code, out=out.getvalue(), err=err.getvalue())


@contextmanager
def _as_alone() -> Iterator[None]:
    """Puts back what a recipe changes in its process, which is its own elsewhere."""
    threads, handlers = torch.get_num_threads(), {number: signal.getsignal(number) for number in _SIGNALS}
    with patch.dict(os.environ), patch.object(sys, "path", list(sys.path)):
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            torch.set_num_threads(threads)
            torch.set_flush_denormal(False)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            _release_locks()


def _release_locks() -> None:
    """A run holds its output_dir until its process ends."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").endswith("/.lock"):
                os.close(int(name))


@contextmanager
def _no_weights() -> Iterator[None]:
    users = ("training.setup.read_weights", "distillation.teachers.read_weights")
    loaders = [*users, "training.distributed.set_model_state_dict", "training.checkpoints.dcp.load"]
    patches = [patch(f"torchtune_grpo.{name}", side_effect=WeightsLoad) for name in loaders]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def tree(folder: Path) -> dict[str, str]:
    """Every path beneath a folder, a run's lock aside, with what it holds: a digest, a link's target, or nothing."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.name == ".lock":
            continue
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    return found

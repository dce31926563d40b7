"""From a command line to a recipe, and from whatever ends it to one readable message and an exit code."""

import errno
import functools
import os
import traceback
from collections.abc import Callable
from typing import TypeVar

from omegaconf import DictConfig

from torchtune_grpo.config import ConfigError, load
from torchtune_grpo.config_faults import reason
from torchtune_grpo.failures import TRACEBACK_VARIABLE, RunError, end_run, own_rank, stop_watching

T = TypeVar("T")

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_CONNECTION_LOST = ("Connection reset by peer", "Connection closed by peer", "remote process exited")
_LESS_MEMORY = (
    "Lower max_tokens_per_micro_batch or set activation_checkpointing=true (update, old_logprobs, reference, "
    "teachers); lower generate.max_cached_tokens or set generate.gather_parameters=false (rollout), lower batch_size "
    "in `evaluation` (evaluate); or dtype=bf16, or more ranks"
)


def recipe_entry(schema: type[T]) -> Callable[[Callable[[T], None]], Callable[[], None]]:
    """Makes ``recipe_main(cfg: schema)`` a command that takes ``--config FILE`` and ``key=value`` overrides.

    An exception on any rank ends all of them, with one message on rank 0's stderr and exit code 2 for a
    ``ConfigError``, 130 for Ctrl-C, else 1. A traceback stands before it where the message may not be enough: for
    what is neither ``ConfigError``, ``RunError``, want of memory or disk nor a lost connection; with the
    environment variable TORCHTUNE_GRPO_TRACEBACK=1, always.
    """

    def decorate(recipe_main: Callable[[T], None]) -> Callable[[], None]:
        @functools.wraps(recipe_main)
        def main() -> None:
            try:
                recipe_main(load(_parse_command_line(recipe_main.__doc__), schema))
            except SystemExit:
                raise
            except BaseException as error:
                message, status, enough = explain(error)
                if not enough or os.environ.get(TRACEBACK_VARIABLE) == "1":
                    traceback.print_exc()
                end_run(message, status)
            finally:
                stop_watching()

        return main

    return decorate


def explain(error: BaseException) -> tuple[str, int, bool]:
    """The message and the exit code that an exception ends the run with, and whether the message is enough."""
    ranks = [] if getattr(error, "names_ranks", False) else [f"rank {own_rank()}"]
    where = ", ".join([*ranks, *getattr(error, "__notes__", [])])
    advice = f"({where + '; ' if where else ''}{TRACEBACK_VARIABLE}=1 shows the traceback)"
    if isinstance(error, ConfigError):
        return f"Config error:\n{error}\n{advice}", 2, True
    if isinstance(error, RunError):
        return f"Error:\n{error}\n{advice}", 1, True
    if isinstance(error, KeyboardInterrupt):
        return f"Interrupted ({where})", 130, True
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY):
        return f"Error:\nout of memory: {text.splitlines()[0]:.300}\n{_LESS_MEMORY}\n{advice}", 1, True
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"Error:\nno room left on the disk: {text}; free some and launch again\n{advice}", 1, True
    if any(sign in str(error) for sign in _CONNECTION_LOST):
        lost = "another rank left without a word: was it killed, as for want of memory? See its own output"
        return f"Error:\n{lost}; here: {text:.300}\n{advice}", 1, True
    return f"Error:\n{text}\n({where}; see the traceback above)", 1, False


def _parse_command_line(description: str | None) -> DictConfig:
    import torchtune.config

    parsed = []

    def keep(cfg: DictConfig) -> None:
        parsed.append(cfg)

    keep.__doc__ = description  # the text of --help
    try:
        torchtune.config.parse(keep)()
    except SystemExit:  # torchtune exits once the function has returned; argparse exits before it was called
        if not parsed:
            raise
    except Exception as error:
        raise ConfigError(f"--config and key=value overrides: {reason(error)}") from error
    return parsed[0]

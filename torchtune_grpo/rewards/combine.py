"""Several judges and their weights become the one reward that a policy is trained on."""

import math
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torchtune_grpo.config import ConfigError
from torchtune_grpo.config_values import nearest
from torchtune_grpo.failures import RunError, place, time_limit
from torchtune_grpo.rewards.context import context_names
from torchtune_grpo.types import RewardFn, Rewards


class RewardError(RunError):
    """A judge raised or returned something else than rewards. ``row``: the completion at which, None if unknown."""

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


@dataclass(frozen=True, kw_only=True)
class RewardSum:
    """The weighted sum of named judges, one of which is the verifier whose reward > 0 is success.

    ``fns`` and ``weights`` have the same keys, which are also the names of the parts in the log. A judge of
    weight 0 is asked and logged and has no say in the total: what it cannot judge stays in. ``timeout_s``:
    seconds that one call of a judge, for all completions of a rank, may take before it ends the run; null sets
    no limit.

    Raises:
        ConfigError: keys that differ, an unknown verifier, a weight that is no finite number, a limit <= 0.
    """

    fns: Mapping[str, RewardFn]
    weights: Mapping[str, float]
    verifier: str
    timeout_s: float | None = 600.0

    def __post_init__(self) -> None:
        if not self.fns:
            raise ConfigError("fns: got no judge, expected at least one")
        for name in self.weights:
            if name not in self.fns:
                raise ConfigError(f"weights.{name}: no judge of this name in fns{nearest(name, self.fns)}")
        for name in self.fns:
            if name not in self.weights:
                raise ConfigError(f"weights: missing a weight for {name!r}, expected one for each judge in fns")
            if not math.isfinite(self.weights[name]):
                raise ConfigError(f"weights.{name}: got {self.weights[name]}, expected a finite number")
        if self.verifier not in self.fns:
            raise ConfigError(
                f"verifier: got {self.verifier!r}, expected one of fns ({', '.join(self.fns)})"
                f"{nearest(self.verifier, self.fns)}"
            )
        if self.timeout_s is not None and not 0 < self.timeout_s <= threading.TIMEOUT_MAX:
            raise ConfigError(f"timeout_s: got {self.timeout_s}, expected a positive number of seconds, or null")
        _ = self._takes

    @cached_property
    def _takes(self) -> Mapping[str, frozenset[str]]:
        return {name: context_names(fn, f"fns.{name}") for name, fn in self.fns.items()}

    def __call__(
        self,
        completions: Sequence[str],
        answers: Sequence[str],
        *,
        response_lengths: Sequence[int],
        truncated: Sequence[bool],
        source: Sequence[str],
    ) -> Rewards:
        """Judge N rows of one rank; on CPU, no collectives.

        Raises:
            RewardError: a judge raised, or returned the wrong count or something other than finite numbers and None.
        """
        context = {"response_lengths": response_lengths, "truncated": truncated, "source": source}
        parts = {}
        for name, fn in self.fns.items():
            taken = {key: value for key, value in context.items() if key in self._takes[name]}
            with time_limit(self.timeout_s, f"rewards.fns.{name} (limit: rewards.timeout_s)"):
                values = _call(name, fn, completions, answers, taken)
            parts[name] = _as_tensor(name, values, len(completions))
        total = torch.zeros(len(completions))
        for name, weight in self.weights.items():
            if weight != 0:  # 0 * NaN is NaN
                total += weight * parts[name]
        success = torch.where(parts[self.verifier].isnan(), torch.nan, (parts[self.verifier] > 0).float())
        return Rewards(total=total, parts=parts, success=success)


def _call(
    name: str, fn: RewardFn, completions: Sequence[str], answers: Sequence[str], taken: Mapping[str, Sequence[Any]]
) -> Any:
    """What the judge returns. Where it raises, the rows are tried one by one to find one at which it does."""
    try:
        return fn(completions, answers, **taken)
    except (Exception, SystemExit) as error:
        row = next((i for i in range(len(completions)) if _raises(fn, completions, answers, taken, i)), None)
        at = f"on {len(completions)} rows, on none of them alone"
        if row is not None:
            at = f"at row {row}, answer {answers[row]!r:.80}, completion {completions[row]!r:.160}"
        where = place(traceback.extract_tb(error.__traceback__))
        message = f"fns.{name}: this judge raised {type(error).__name__}: {error} ({where}) {at}"
        raise RewardError(message, row) from error


def _raises(
    fn: RewardFn, completions: Sequence[str], answers: Sequence[str], taken: Mapping[str, Sequence[Any]], row: int
) -> bool:
    alone = slice(row, row + 1)
    try:
        fn(completions[alone], answers[alone], **{key: values[alone] for key, values in taken.items()})
    except (Exception, SystemExit):
        return True
    return False


def _as_tensor(name: str, values: Any, rows: int) -> Tensor:
    """One judge's verdicts as fp32 ``[N]``, NaN for None."""
    expected = f"expected a list of {rows} rewards, one for each completion"
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise RewardError(f"fns.{name}: this judge returned {values!r:.80}, {expected}")
    values = list(values)
    if len(values) != rows:
        raise RewardError(f"fns.{name}: this judge returned {len(values)} rewards, {expected}")
    part = torch.full((rows,), math.nan)
    for row, value in enumerate(values):
        if value is None:
            continue
        if not isinstance(value, Real) or not abs(value) <= torch.finfo(torch.float32).max:
            raise RewardError(
                f"fns.{name}: this judge returned {value!r:.80} for row {row}, expected a finite number, or None for "
                "a row that it cannot judge",
                row,
            )
        part[row] = float(value)
    return part

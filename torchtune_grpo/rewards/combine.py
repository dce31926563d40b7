"""Several judges and their weights become the one reward that a policy is trained on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torchtune_grpo.config import ConfigError
from torchtune_grpo.config_values import nearest
from torchtune_grpo.rewards.context import context_names
from torchtune_grpo.types import RewardFn, Rewards


@dataclass(frozen=True, kw_only=True)
class RewardSum:
    """The weighted sum of named judges, one of which is the verifier whose reward > 0 is success.

    ``fns`` and ``weights`` have the same keys, which are also the names of the parts in the log. A judge of
    weight 0 is asked and logged and has no say in the total: what it cannot judge stays in.

    Raises:
        ConfigError: keys that differ, an unknown verifier, a weight that is no finite number.
    """

    fns: Mapping[str, RewardFn]
    weights: Mapping[str, float]
    verifier: str

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
            ValueError: a judge returned the wrong count, or something other than a finite number, NaN or
            None.
        """
        context = {"response_lengths": response_lengths, "truncated": truncated, "source": source}
        parts = {}
        for name, fn in self.fns.items():
            taken = {key: value for key, value in context.items() if key in self._takes[name]}
            parts[name] = _as_tensor(name, fn(completions, answers, **taken), len(completions))
        total = torch.zeros(len(completions))
        for name, weight in self.weights.items():
            if weight != 0:  # 0 * NaN is NaN
                total += weight * parts[name]
        success = torch.where(parts[self.verifier].isnan(), torch.nan, (parts[self.verifier] > 0).float())
        return Rewards(total=total, parts=parts, success=success)


def _as_tensor(name: str, values: Any, rows: int) -> Tensor:
    """One judge's verdicts as fp32 ``[N]``, NaN for None."""
    values = list(values)
    if len(values) != rows:
        raise ValueError(f"judge {name!r} returned {len(values)} rewards, expected one for each of {rows} completions")
    for row, value in enumerate(values):
        if value is not None and not isinstance(value, Real):
            raise ValueError(f"judge {name!r} returned {value!r:.80} for row {row}, expected a number or None")
    part = torch.tensor([math.nan if value is None else float(value) for value in values], dtype=torch.float32)
    if part.isinf().any():
        raise ValueError(f"judge {name!r} returned an infinite reward for row {int(part.isinf().nonzero()[0])}")
    return part

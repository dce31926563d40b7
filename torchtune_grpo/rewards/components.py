"""The judges that a config names: format, exact answer, and any function of the user's."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torchtune_grpo.config import ConfigError, locate
from torchtune_grpo.rewards.answers import answers_match, is_gradable
from torchtune_grpo.rewards.context import context_names
from torchtune_grpo.rewards.xml import parse_completion


@dataclass(frozen=True, kw_only=True)
class FormatReward:
    """1 where the completion keeps the format contract of ``torchtune_grpo.rewards.xml``, else 0.

    ``prefilled_think``: the prompt ends in ``<think>``, so that completions start inside it.
    """

    prefilled_think: bool = True

    def __call__(self, completions: Sequence[str], answers: Sequence[str]) -> list[float | None]:
        return [float(parse_completion(text, self.prefilled_think).well_formed) for text in completions]


@dataclass(frozen=True, kw_only=True)
class ExactAnswerReward:
    """1 where the completion's final answer equals the gold answer, else 0; None where the gold cannot be
    judged.

    ``require_format`` pays only completions that keep the format contract too. ``timeout_s`` (seconds) bounds
    the symbolic comparison of one row; numbers and plain text never need it.
    """

    prefilled_think: bool = True
    require_format: bool = False
    timeout_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s: got {self.timeout_s}, expected a positive number of seconds")

    def __call__(self, completions: Sequence[str], answers: Sequence[str]) -> list[float | None]:
        return [self._judge(text, gold) for text, gold in zip(completions, answers, strict=True)]

    def _judge(self, completion: str, gold: str) -> float | None:
        parsed = parse_completion(completion, self.prefilled_think)
        if self.require_format and not parsed.well_formed:
            return 0.0 if is_gradable(gold) else None
        match = answers_match(parsed.answer, gold, self.timeout_s)
        return None if match is None else float(match)


@dataclass(frozen=True, kw_only=True)
class CallableReward:
    """Any function ``(completions, answers, ...) -> list[float | None]``, by its import path
    ``package.module.name``.

    The function may name ``response_lengths``, ``truncated`` and ``source`` to be given them too.

    Raises:
        ConfigError: nothing callable of that name can be imported, or it needs other arguments.
    """

    path: str

    def __post_init__(self) -> None:
        _ = self._takes

    @cached_property
    def _function(self) -> Callable[..., Any]:
        try:
            return locate(self.path, "")
        except ConfigError as error:
            raise ConfigError(f"path: {str(error).partition(': ')[2]}") from error

    @cached_property
    def _takes(self) -> frozenset[str]:
        return context_names(self._function, "path")

    def __call__(self, completions: Sequence[str], answers: Sequence[str], **context: Any) -> list[float | None]:
        return self._function(completions, answers, **{k: v for k, v in context.items() if k in self._takes})

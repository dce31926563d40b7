"""What a judge may ask for beside completions and answers, and how it asks: by naming it in its signature."""

import inspect
from collections.abc import Callable
from typing import Any

from torchtune_grpo.config import ConfigError
from torchtune_grpo.config_values import parameters

CONTEXT = ("response_lengths", "truncated", "source")
_GIVEN = ("completions", "answers")


def context_names(judge: Callable[..., Any], name: str) -> frozenset[str]:
    """The members of ``CONTEXT`` that ``judge`` takes: those it names, or all if it has ``**kwargs``.

    Raises:
        ConfigError: it needs an argument that nobody gives; ``name`` says which judge in the message.
    """
    signature = parameters(judge)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.values()):
        return frozenset(CONTEXT)
    needed = [key for key, parameter in signature.items() if parameter.default is parameter.empty]
    unknown = [key for key in needed if key not in _GIVEN + CONTEXT and not signature[key].kind.name.startswith("VAR")]
    if unknown:
        known = ", ".join(_GIVEN + CONTEXT)
        raise ConfigError(f"{name}: this judge needs {', '.join(unknown)}, expected only arguments among {known}")
    return frozenset(signature) & frozenset(CONTEXT)

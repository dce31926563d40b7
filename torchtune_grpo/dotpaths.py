"""Which importable things a config may name: classes and functions, but for private ones and the standard library's.

What a component is given comes from the config too, so ``os.system`` would make of a config a script. Nobody's
training needs such a component, while a module of the user's own, which may do anything, is as welcome as an installed
one. That keeps accidents out, not an attacker: importing a module runs it, so run only configs that you trust.
"""

import os
import sys
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torchtune_grpo.config_values import nearest, show

_ADVICE = "expected a component; a module of your own must have another name"


def find(dotpath: Any) -> Callable[..., Any]:
    """The class or function of that name; the working directory is looked into first.

    Raises:
        ValueError: no dotpath, nothing importable or callable of that name, a private name, or the standard library's.
    """
    names = dotpath.split(".") if isinstance(dotpath, str) else []
    if not names or not all(part.isidentifier() for part in names):
        raise ValueError(f"got {show(dotpath)}, expected a dotpath such as package.module.name")
    if names[0] in sys.stdlib_module_names:
        raise ValueError(f"got {dotpath!r}, of Python's standard library, {_ADVICE}")
    if any(part.startswith("_") for part in names):
        raise ValueError(f"got {dotpath!r}, a private name, expected a public class or function")
    # First, not last: the user's own `dev` or module of any name must win over an installed one.
    if os.getcwd() not in sys.path[:1]:
        sys.path.insert(0, os.getcwd())
    found = _resolve(dotpath, names)
    if isinstance(found, types.ModuleType) or not callable(found):
        raise ValueError(f"got {dotpath!r}, a {type(found).__name__}, expected a class or function")
    defined_in = found.__module__ if isinstance(found, type) or hasattr(found, "__name__") else None
    if (defined_in or "").partition(".")[0] in sys.stdlib_module_names:
        raise ValueError(f"got {dotpath!r}, {defined_in}.{found.__name__} of Python's standard library, {_ADVICE}")
    return found


def _resolve(dotpath: str, names: list[str]) -> Any:
    found: Any = None
    for i, name in enumerate(names):
        try:
            if found is None or (isinstance(found, types.ModuleType) and not hasattr(found, name)):
                found = import_module(".".join(names[: i + 1]))
            else:
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"cannot import {dotpath!r}: {error}{nearest(name, dir(found))}") from error
        except (Exception, SystemExit) as error:  # a module of the user's may fail in any way
            raise ValueError(f"cannot import {dotpath!r}: {type(error).__name__}: {error}") from error
    return found

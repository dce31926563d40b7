"""Whether a value read from YAML can be meant for a type annotation, and words for saying why not.

What an annotation means to a YAML file: scalars are what they are (an int also serves as a float, a bool
only as a bool), a list serves as any collection but a string or mapping, a string serves as a path. Any other
class, and anything that is called, can only come from a ``_component_`` node. An annotation that is not
understood (a string, a type variable, an enum, a protocol without ``__call__``) fits everything.
"""

import difflib
import enum
import inspect
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

COMPONENT_KEY = "_component_"
_SCALARS = (bool, int, float, str, types.NoneType)
_BUILTIN_COLLECTIONS = (list, tuple, set, frozenset, dict)


def is_component(value: Any) -> bool:
    return isinstance(value, dict) and COMPONENT_KEY in value


def options(annotation: Any) -> list[Any]:
    """The alternatives of a union, flattened; one entry where the annotation is no union."""
    if get_origin(annotation) is typing.Annotated:
        return options(get_args(annotation)[0])
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return [option for part in get_args(annotation) for option in options(part)]
    return [types.NoneType if annotation is None else annotation]


def fits(value: Any, option: Any) -> bool:
    """Whether ``value`` itself can be meant for one ``option``; its items are not looked at."""
    origin = get_origin(option) or option
    if origin is Literal:
        return any(value == allowed and type(value) is type(allowed) for allowed in get_args(option))
    if origin is float:
        return type(value) in (int, float)
    if origin in _SCALARS:
        return type(value) is origin
    if is_component(value):
        return origin not in _BUILTIN_COLLECTIONS
    if origin is Callable or (_is_protocol(origin) and "__call__" in vars(origin)):
        return False
    if not isinstance(origin, type) or origin is inspect.Parameter.empty or _is_protocol(origin):
        return True
    return issubclass(origin, enum.Enum) or _fits_class(value, origin, get_args(option))


def _fits_class(value: Any, origin: type, args: tuple[Any, ...]) -> bool:
    if isinstance(value, list):
        right_length = origin is not tuple or not args or Ellipsis in args or len(args) == len(value)
        return right_length and (origin in (tuple, set, frozenset) or issubclass(list, origin))
    if isinstance(value, str) and origin is not object:
        return issubclass(origin, os.PathLike)
    return isinstance(value, origin)


def item_annotation(option: Any, index: int) -> Any:
    """The annotation of item ``index`` of a list, or of a mapping's values; ``Any`` where none is known."""
    origin, args = get_origin(option), get_args(option)
    if not args or origin.__module__ not in ("builtins", "collections.abc"):
        return Any
    if issubclass(origin, Mapping):
        return args[1]
    return args[index] if origin is tuple and Ellipsis not in args else args[0]


def describe(annotation: Any) -> str:
    """What an annotation expects, in words."""
    return " or ".join(dict.fromkeys(_describe_option(option) for option in options(annotation)))


def _describe_option(option: Any) -> str:
    origin = get_origin(option) or option
    if origin in (Any, inspect.Parameter.empty) or isinstance(option, str):
        return "a value"
    if origin is types.NoneType:
        return "null"
    if origin is Literal:
        return "one of " + ", ".join(repr(allowed) for allowed in get_args(option))
    if origin in _SCALARS:
        return f"{'an' if origin is int else 'a'} {origin.__name__}"
    if origin.__module__ in ("builtins", "collections.abc") and origin is not Callable:
        return f"a {str(option).removeprefix('collections.abc.') if get_args(option) else origin.__name__}"
    if isinstance(origin, type) and issubclass(origin, os.PathLike):
        return "a path"
    return f"a {getattr(origin, '__name__', origin)} (a mapping with {COMPONENT_KEY})"


def show(value: Any) -> str:
    """What was got, in words that tell 1 from '1'."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        if is_component(value):
            return f"the component {value[COMPONENT_KEY]}"
        return f"a mapping with {', '.join(map(str, value))}" if value else "an empty mapping"
    text = repr(value)
    short = text if len(text) <= 80 else text[:77] + "..."
    return f"the {type(value).__name__ if not isinstance(value, str) else 'string'} {short}"


def hint(value: Any, annotation: Any) -> str:
    """How to write what was probably meant; empty where there is no guess."""
    accepted = options(annotation)
    allowed = [item for option in accepted if get_origin(option) is Literal for item in get_args(option)]
    if isinstance(value, str) and allowed:
        return nearest(value, [item for item in allowed if isinstance(item, str)])
    if isinstance(value, str) and {int, float} & set(accepted) and _is_number(value):
        return "; it was read as a string: write the number without quotes"
    if isinstance(value, float) and value.is_integer() and int in accepted:
        return f"; write {int(value)}"
    return ""


def oddity(value: Any) -> str:
    """What a number should be that no key can mean, whatever its annotation; empty for all others."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "a number of at most 64 bits"
    return ""


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.5) -> str:
    """``; did you mean 'x'?`` for the nearest valid name, empty where none is as near as ``cutoff``."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters, annotations evaluated where that can be done; ``**anything`` where nothing is known."""
    try:
        return inspect.signature(target, eval_str=True).parameters
    except Exception:  # evaluating foreign annotations can fail in any way
        pass
    try:
        return inspect.signature(target).parameters
    except ValueError:
        return inspect.signature(lambda **anything: anything).parameters


def plain(value: Any) -> Any:
    """``value`` with every mapping a dict and every sequence a list."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def join(path: str, key: Any) -> str:
    """The dotted path of ``key`` in the node at ``path``."""
    return f"{path}.{key}" if path else str(key)


def _is_protocol(cls: Any) -> bool:
    return getattr(cls, "_is_protocol", False)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

"""From a YAML file to checked values and components, before anything heavy is imported or allocated.

A recipe declares its config as a keyword-only dataclass whose fields are the top-level keys. A node that
holds ``_component_: some.dotpath`` is built by calling that dotpath with the node's other keys, children
first, so the parameters of a component *are* its config keys. ``load`` holds every key and value of the tree
against those signatures and reports all faults together; ``instantiate`` builds. Only OmegaConf and the
standard library are imported here.
"""

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_grpo.config_values import COMPONENT_KEY as _KEY
from torchtune_grpo.config_values import (
    describe,
    fits,
    hint,
    is_component,
    item_annotation,
    join,
    nearest,
    oddity,
    options,
    parameters,
    plain,
    show,
)
from torchtune_grpo.dotpaths import find

T = TypeVar("T")

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ConfigError(ValueError):
    """A fault that the user mends in the config: what was got, what was expected, which key to change."""


class Component(dict[str, Any]):
    """A ``_component_`` node of a loaded config; ``path``: its dotted key; ``provides``: see ``component``.

    In a recipe's config class the name marks a field (also ``Component | None``, ``list[Component]``,
    ``dict[str, Component]``) whose value ``instantiate`` is going to build.
    """

    def __init__(self, node: Mapping[str, Any], path: str, provides: tuple[str, ...] = ()) -> None:
        super().__init__(node)
        self.path, self.provides = path, provides


def component(
    *, runtime: tuple[str, ...] = (), provides: tuple[str, ...] = (), default: Any = dataclasses.MISSING
) -> Any:
    """A ``Component`` field whose recipe passes the arguments named in ``runtime`` to ``instantiate``.

    Those arguments are then neither missing from the YAML nor allowed in it. ``provides``: attributes that what is
    built must have, as a component made for another key has not.
    """
    metadata = {"runtime": runtime, "provides": provides}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def load(cfg: DictConfig, schema: type[T]) -> T:
    """Checks the whole config against ``schema``, a keyword-only dataclass, and returns an instance of it.

    Checked are unknown, misplaced and missing keys and mistyped values, in the schema and in every component
    at any depth. Annotations that no YAML value can be judged by are passed over. Contradictions between keys
    are for the schema's ``__post_init__``.

    Raises:
        ConfigError: one line ``key.path: got X, expected Y`` for each fault found.
    """
    try:
        node = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        key = error.full_key or "config"
        raise ConfigError(f"{key}: this value cannot be resolved: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise ConfigError("config: this value cannot be resolved: interpolations lead in a circle") from error
    check = _Check()
    runtime = {field.name: field.metadata.get("runtime", ()) for field in dataclasses.fields(schema)}
    check.call(schema, node, "", children_runtime=runtime)
    if check.problems:
        raise ConfigError("\n".join(check.lines()))
    provides = {field.name: field.metadata.get("provides", ()) for field in dataclasses.fields(schema)}
    return schema(**{key: _with_paths(value, key, provides[key]) for key, value in node.items()})


def instantiate(node: Mapping[str, Any] | None, /, **runtime: Any) -> Any:
    """Builds a ``_component_`` node, children (in mappings and lists) first; None gives None.

    ``runtime`` arguments go to the outermost component only.

    Raises:
        ConfigError: the dotpath is no importable callable, or the component refused its values or the files that
            they name, or failed; the message starts with the key.
    """
    if node is None:
        return None
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=True)
    path = getattr(node, "path", "")
    if not is_component(node):
        raise ConfigError(f"{path or 'config'}: got {show(node)}, expected a mapping with {_KEY}")
    built = _build(node, path, runtime)
    lacking = [name for name in getattr(node, "provides", ()) if not hasattr(built, name)]
    if lacking:
        raise ConfigError(
            f"{path}: got {show(node)}, which has no {' and no '.join(lacking)}, expected one for this key"
        )
    return built


def to_dict(cfg: Any) -> dict[str, Any]:
    """The values of a loaded config as plain dicts, lists and scalars, interpolations resolved."""
    return {field.name: plain(getattr(cfg, field.name)) for field in dataclasses.fields(cfg)}


def to_yaml(cfg: Any) -> str:
    """A loaded config as YAML, to be kept beside a run; ``load`` reads it back to an equal config."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(cfg)))


def locate(dotpath: str, path: str) -> Callable[..., Any]:
    """What a ``_component_`` dotpath names; ``path`` is the key of its node, for the message. Raises ConfigError."""
    try:
        return find(dotpath)
    except ValueError as error:
        raise ConfigError(f"{join(path, _KEY)}: {error}") from error


def _build(value: Any, path: str, runtime: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_build(item, f"{path}[{i}]", {}) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    arguments = {key: _build(item, join(path, key), {}) for key, item in value.items() if key != _KEY}
    if _KEY not in value:
        return arguments
    target = locate(value[_KEY], path)
    try:
        return target(**arguments | runtime)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path or value[_KEY]}: {error}") from error
    except Exception as error:  # its arguments come from the config, whatever it makes of them
        raise ConfigError(f"{path or value[_KEY]}: {value[_KEY]} failed: {type(error).__name__}: {error}") from error


class _Check:
    """Collects the faults of a config tree; where a stray key belongs is known once all of it was seen."""

    def __init__(self) -> None:
        self.problems: list[tuple[str, str]] = []
        self._unknown: dict[str, str] = {}
        self._names: dict[str, list[str]] = {}

    def lines(self) -> Iterator[str]:
        for path, message in self.problems:
            yield f"{path}: {message}{self._where_it_belongs(path)}"

    def call(
        self,
        target: Callable[..., Any],
        node: Mapping[str, Any],
        path: str,
        runtime: tuple[str, ...] = (),
        children_runtime: Mapping[str, tuple[str, ...]] = types.MappingProxyType({}),
    ) -> None:
        """Holds the keys of ``node`` against the parameters of ``target``."""
        accepted = parameters(target)
        named = {name: p for name, p in accepted.items() if p.kind in _NAMED}
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
        self._names[path] = [name for name in named if name not in runtime]
        for key, value in node.items():
            if key == _KEY:
                continue
            if key in runtime:
                self._add(join(path, key), "this value comes from the recipe: remove the key")
            elif key in named:
                if value is not None or named[key].default is not None:
                    self.value(value, named[key].annotation, join(path, key), children_runtime.get(key, ()))
            elif not takes_any:
                self._unknown[join(path, key)] = path
                self._add(join(path, key), "unknown key")
        for name in set(runtime) - set(named) if not takes_any else ():
            self._add(join(path, _KEY), f"{node.get(_KEY)} takes no {name!r}, which the recipe passes to it")
        for name, parameter in named.items():
            if parameter.default is parameter.empty and name not in node and name not in runtime:
                self._add(join(path, name), f"missing, expected {describe(parameter.annotation)}")

    def value(self, value: Any, annotation: Any, path: str, runtime: tuple[str, ...] = ()) -> None:
        """Holds one value, and what it contains, against an annotation."""
        accepting = [option for option in options(annotation) if fits(value, option)]
        if value == "???" or not accepting:
            got = "nothing (???)" if value == "???" else show(value)
            self._add(path, f"got {got}, expected {describe(annotation)}{hint(value, annotation)}")
        elif odd := oddity(value):
            self._add(path, f"got {show(value)}, expected {odd}")
        elif isinstance(value, list):
            for i, item in enumerate(value):
                self.value(item, item_annotation(accepting[0], i), f"{path}[{i}]", runtime)
        elif is_component(value):
            try:
                target = locate(value[_KEY], path)
            except ConfigError as error:
                self._add(*str(error).split(": ", 1))
            else:
                self.call(target, value, path, runtime)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.value(item, item_annotation(accepting[0], 1), join(path, key), runtime)

    def _add(self, path: str, message: str) -> None:
        self.problems.append((path, message))

    def _where_it_belongs(self, path: str) -> str:
        if path not in self._unknown:
            return ""
        here, name = self._unknown[path], path.rsplit(".", 1)[-1]
        elsewhere = [node or "the top level" for node, names in self._names.items() if name in names]
        belongs = f"; it belongs in {' or '.join(elsewhere[:3])}" if elsewhere else ""
        return nearest(name, self._names[here], cutoff=0.85 if elsewhere else 0.5) + belongs


def _with_paths(value: Any, path: str, provides: tuple[str, ...] = ()) -> Any:
    """Marks every ``_component_`` node with its path, the outermost with what they must provide."""
    if isinstance(value, list):
        return [_with_paths(item, f"{path}[{i}]", provides) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    inner = () if is_component(value) else provides
    node = {key: _with_paths(item, join(path, key), inner) for key, item in value.items()}
    return Component(node, path, provides) if is_component(node) else node

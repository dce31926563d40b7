"""What is wrong with a config file or a command line, in one line, from what their readers raise."""

import sys
from typing import Any

from yaml import YAMLError


def reason(error: Exception) -> str:
    """One line that says what was got and where: file, line and fault where a parser knows them."""
    if isinstance(error, UnicodeDecodeError):
        return f"the config file is not UTF-8: {error.reason} (byte {error.start})"
    if isinstance(error, YAMLError):
        return _yaml_fault(error)
    if isinstance(error, RecursionError):
        return "the config file is nested too deeply"
    if "Cannot merge" in str(error):  # OmegaConf's, which does not say where
        overrides = [argument for argument in sys.argv[1:] if "=" in argument]
        return f"these overrides, a list for a mapping or the reverse, cannot be merged into the config: {overrides}"
    if isinstance(error, TypeError | AttributeError):  # of torchtune's parser, which takes mappings with names as keys
        return f"got a config file that is no mapping of names to values, such as `seed: 1` ({error})"
    return " ".join(str(error).split())


def _yaml_fault(error: Any) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{mark.name}, line {mark.line + 1}: " if mark is not None else ""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return f"{where}not valid YAML: " + " ".join(str(problem).split())

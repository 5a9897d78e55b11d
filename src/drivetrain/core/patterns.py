"""Patterns of parameters' names, by which settings apply to some of a model's parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from drivetrain.core.errors import UserError, did_you_mean

SHOWN = 8  # names in a message


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern with * and ? matches a parameter's name, or the name of a module that contains the parameter."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")


def check_patterns(names: Collection[str], patterns: Mapping[str, Collection[str]], what: str = "trainable parameter") -> None:
    """Raise UserError for every pattern that matches no parameter. `patterns` are given by the key that they are set in."""
    problems = [
        f"{key}: {pattern!r} matches no {what} of the model: {_near(pattern, names)}"
        for key, given in patterns.items()
        for pattern in given
        if not any(matches(name, pattern) for name in names)
    ]
    if problems:
        raise UserError(problems)


def _near(pattern: str, names: Collection[str]) -> str:
    """A hint for a pattern: the names of parameters and modules that are similar, or the outermost names of all."""
    modules = {name[:i] for name in names for i, character in enumerate(name) if character == "."}
    if get_close_matches(pattern, {*names, *modules}):
        return did_you_mean(pattern, {*names, *modules})
    outermost = sorted({name.partition(".")[0] for name in names})
    more = f", … ({len(outermost)} in all)" if len(outermost) > SHOWN else ""
    return f"there is: {', '.join(outermost[:SHOWN])}{more}, and what is in them, such as {min(names, key=len, default='')}"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings with dotted keys: `{head: {bias: 2}}`, as in a recipe, becomes `{head.bias: 2}`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found

"""Patterns of parameters' names, by which settings apply to some of a model's parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from drivetrain.core.errors import UserError, did_you_mean


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern with * and ? matches a parameter's name, or the name of a module that contains the parameter."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")


def check_patterns(names: Collection[str], patterns: Mapping[str, Collection[str]], what: str = "trainable parameter") -> None:
    """Raise UserError for every pattern that matches no parameter. `patterns` are given by the key that they are set in."""
    modules = {name[:i] for name in names for i, character in enumerate(name) if character == "."}
    problems = [
        f"{key}: {pattern!r} matches no {what} of the model: {did_you_mean(pattern, {*names, *modules})}"
        for key, given in patterns.items()
        for pattern in given
        if not any(matches(name, pattern) for name in names)
    ]
    if problems:
        raise UserError(problems)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings with dotted keys: `{head: {bias: 2}}`, as in a recipe, becomes `{head.bias: 2}`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found

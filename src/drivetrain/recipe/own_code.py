"""Code of the user's own, which a recipe never brings: the operator chooses it on the command line, beside the recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.core.overrides import format_value

GROUPS = ("model", "data", "loss", "metrics")  # their option `own` names a class or a function
_DOTTED = re.compile(r"[A-Za-z_][\w.]*")  # needs no quotes


def is_own(group: str, option: Any) -> bool:
    """Whether this option of a group names code."""
    return group in GROUPS and "own" in (option if isinstance(option, list) else [option])


def refusal(group: str) -> str:
    """Why a recipe alone cannot choose it."""
    return (
        f"a recipe cannot choose '{group}=own' (it names code): choose it on the command line too, with its target and "
        "trust=[…], or bring the code in a bundle"
    )


def targets(choices: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """The dotted names of the code that a config uses: key → name. `values` have dotted keys."""
    groups = [group for group, option in choices.items() if is_own(group, option)]
    keys = [key for group in groups for key in (f"{group}.target", f"{group}.own.target", f"{group}.collate")]
    return {key: str(values[key]) for key in keys if values.get(key)}


def words(choices: Mapping[str, Any], values: Mapping[str, Any], trust: Sequence[str]) -> list[str]:
    """What the operator says beside the recipe of a config to run it with its code; [] where it has none."""
    groups = {group: option for group, option in choices.items() if is_own(group, option)}
    found = targets(choices, values)
    packages = {name.partition(".")[0] for name in found.values()}
    trusted = sorted(word for word in trust if word.partition("@")[0] in packages)
    given = [f"{group}={format_value(option)}" for group, option in groups.items()]
    given += [f"{key}={name if _DOTTED.fullmatch(name) else format_value(name)}" for key, name in found.items()]
    return [*given, *([f"trust={format_value(trusted)}"] if trusted else [])]

"""The claim of a recipe, a measured speed-up. Anyone may have written the file, so every part of it is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from drivetrain.core.errors import did_you_mean
from drivetrain.recipe.safe_yaml import allowed_in_recipe, is_plain_key, plain_value, printable

QUALITIES = ("PASS", "FAIL", "INCONCLUSIVE")
MAX_RATIO = 1e9  # a greater speed-up is a mistake
MAX_CHARACTERS = 200  # of a text


@dataclass(frozen=True)
class Claim:
    """How much faster than its baseline a recipe was measured to be, on which machine, and how the baseline differs."""

    ratio: float  # samples a second, divided by the baseline's
    interval: tuple[float, float]  # the 95 % confidence interval of the ratio
    device: str
    versions: dict[str, str]
    against: dict[str, Any]  # what the baseline has instead: group → option, dotted key → value
    measured: str | None = None  # a date
    quality: str | None = None  # one of QUALITIES
    lines: dict[str, int] = field(default_factory=dict, compare=False)  # key of `against` → its line, for messages


def read(path: Path, key_node: yaml.Node, node: yaml.Node, problems: list[str]) -> Claim | None:
    """The claim below a recipe's `claim:`, or None with the reasons in `problems`."""
    where, before = f"{path}:{key_node.start_mark.line + 1}", len(problems)
    if not isinstance(node, yaml.MappingNode):
        problems.append(f"{where}: claim: must be a mapping of {', '.join(_FIELDS)}")
        return None
    found: dict[str, Any] = {}
    for k, v in node.value:
        key, at = str(k.value), f"{path}:{k.start_mark.line + 1}"
        if key not in _FIELDS:
            problems.append(f"{at}: claim has no '{printable(key)}': {did_you_mean(key, _FIELDS)}")
        elif key == "against":
            found["against"], found["lines"] = _against(path, at, v, problems)
        else:
            before_value = len(problems)
            value = plain_value(v, at, f"claim.{key}", problems)
            if len(problems) == before_value and (wrong := _FIELDS[key](value)):
                problems.append(f"{at}: claim.{key}={printable(str(value)):.60}: {wrong}")
            found[key] = tuple(value) if isinstance(value, list) else value
    given = {str(k.value) for k, _ in node.value}
    problems += [f"{where}: claim has no {key}: {text}" for key, text in _REQUIRED.items() if key not in given]
    if len(problems) > before:
        return None
    claim = Claim(**found)
    if not claim.interval[0] <= claim.ratio <= claim.interval[1]:
        problems.append(f"{where}: claim.ratio={claim.ratio} lies outside claim.interval={list(claim.interval)}")
    return claim


def _against(path: Path, where: str, node: yaml.Node, problems: list[str]) -> tuple[dict[str, Any], dict[str, int]]:
    """Keys and values, under the same rules as a recipe's own, and their lines."""
    if not isinstance(node, yaml.MappingNode) or not node.value:
        problems.append(f"{where}: claim.against must be a mapping of what the baseline has instead, as {{precision: fp32}}")
        return {}, {}
    found, lines = {}, {}
    for k, v in node.value:
        key, at = str(k.value), f"{path}:{k.start_mark.line + 1}"
        if allowed_in_recipe(key, at, problems) and is_plain_key(key, at, problems):
            found[key], lines[key] = plain_value(v, at, key, problems), k.start_mark.line + 1
    return found, lines


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_RATIO


def _number(value: Any) -> str:
    return "" if _is_number(value) else "must be a number above 0"


def _interval(value: Any) -> str:
    good = isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)) and value[0] <= value[1]
    return "" if good else "must be [low, high], two numbers above 0"


def _text(value: Any) -> str:
    """A text is printed to terminals, so it may hold no control characters."""
    good = isinstance(value, str) and value.isprintable() and 0 < len(value) <= MAX_CHARACTERS
    return "" if good else f"must be a text in one line of at most {MAX_CHARACTERS} characters: quote it, if it is one"


def _versions(value: Any) -> str:
    good = isinstance(value, dict) and all(not _text(part) for pair in value.items() for part in pair)
    return "" if good else "must be a mapping of name → text, as {torch: 2.15.0}: quote what YAML reads as a number"


def _quality(value: Any) -> str:
    return "" if value in QUALITIES else f"must be one of {', '.join(QUALITIES)}"


_FIELDS: dict[str, Callable[[Any], str]] = {  # key → the function that says what is wrong with its value; "" if nothing is
    "ratio": _number, "interval": _interval, "device": _text, "versions": _versions, "against": lambda _: "",
    "measured": _text, "quality": _quality,
}  # fmt: skip
_REQUIRED = {
    "ratio": "samples a second, divided by the baseline's",
    "interval": "the 95 % confidence interval of the ratio, as [1.85, 1.97]",
    "device": "the device that it was measured on",
    "versions": "the software that it was measured with, as {torch: 2.15.0}",
    "against": "what the baseline has instead, as {precision: fp32}",
}

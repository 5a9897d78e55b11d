"""What a recipe says it is worth: read from a file that anyone may have written, so every part of it is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from drivetrain.core.errors import did_you_mean
from drivetrain.recipe.safe_yaml import is_key, may_set, plain, shown

QUALITIES = ("PASS", "FAIL", "INCONCLUSIVE")
MOST = 1e9  # times as fast: more is a slip, or a joke
LONGEST = 200  # characters of a text


@dataclass(frozen=True)
class Claim:
    """How much faster than its baseline a recipe was measured to be, where, and what makes it the baseline again."""

    ratio: float  # samples a second, to the baseline's
    interval: tuple[float, float]  # 95 %
    device: str
    versions: dict[str, str]
    against: dict[str, Any]  # group → option, dotted key → value
    measured: str | None = None  # a day
    quality: str | None = None  # one of QUALITIES
    lines: dict[str, int] = field(default_factory=dict, compare=False)  # key of `against` → its line, for messages


def read(path: Path, key_node: yaml.Node, node: yaml.Node, problems: list[str]) -> Claim | None:
    """The claim of a recipe's `claim:`; None where something is wrong, which is added to `problems`."""
    where, before = f"{path}:{key_node.start_mark.line + 1}", len(problems)
    if not isinstance(node, yaml.MappingNode):
        problems.append(f"{where}: claim: wants a mapping of {', '.join(_PARTS)}")
        return None
    found: dict[str, Any] = {}
    for k, v in node.value:
        key, at = str(k.value), f"{path}:{k.start_mark.line + 1}"
        if key not in _PARTS:
            problems.append(f"{at}: claim has no '{shown(key)}': {did_you_mean(key, _PARTS)}")
        elif key == "against":
            found["against"], found["lines"] = _against(path, at, v, problems)
        else:
            said = len(problems)
            value = plain(v, at, f"claim.{key}", problems)
            if len(problems) == said and (wrong := _PARTS[key](value)):
                problems.append(f"{at}: claim.{key}={shown(str(value)):.60}: {wrong}")
            found[key] = tuple(value) if isinstance(value, list) else value
    given = {str(k.value) for k, _ in node.value}
    problems += [f"{where}: claim has no {key}: {text}" for key, text in _NEEDED.items() if key not in given]
    if len(problems) > before:
        return None
    claim = Claim(**found)
    if not claim.interval[0] <= claim.ratio <= claim.interval[1]:
        problems.append(f"{where}: claim.ratio={claim.ratio} lies outside claim.interval={list(claim.interval)}")
    return claim


def _against(path: Path, where: str, node: yaml.Node, problems: list[str]) -> tuple[dict[str, Any], dict[str, int]]:
    """Keys and values under the rules of any recipe's keys, and their lines."""
    if not isinstance(node, yaml.MappingNode) or not node.value:
        problems.append(f"{where}: claim.against wants a mapping of what the baseline has instead, as {{precision: fp32}}")
        return {}, {}
    found, lines = {}, {}
    for k, v in node.value:
        key, at = str(k.value), f"{path}:{k.start_mark.line + 1}"
        if may_set(key, at, problems) and is_key(key, at, problems):
            found[key], lines[key] = plain(v, at, key, problems), k.start_mark.line + 1
    return found, lines


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST


def _number(value: Any) -> str:
    return "" if _is_number(value) else "must be a number above 0"


def _interval(value: Any) -> str:
    good = isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)) and value[0] <= value[1]
    return "" if good else "must be [low, high], two numbers above 0"


def _text(value: Any) -> str:
    """What is shown in terminals may hold nothing that steers them."""
    good = isinstance(value, str) and value.isprintable() and 0 < len(value) <= LONGEST
    return "" if good else f"must be a text in one line of at most {LONGEST} characters: quote it, if it is one"


def _versions(value: Any) -> str:
    good = isinstance(value, dict) and all(not _text(part) for pair in value.items() for part in pair)
    return "" if good else "must be a mapping of name → text, as {torch: 2.15.0}: quote what reads as a number"


def _quality(value: Any) -> str:
    return "" if value in QUALITIES else f"must be one of {', '.join(QUALITIES)}"


_PARTS: dict[str, Callable[[Any], str]] = {  # key → what is wrong with a value of it, or nothing
    "ratio": _number, "interval": _interval, "device": _text, "versions": _versions, "against": lambda _: "",
    "measured": _text, "quality": _quality,
}  # fmt: skip
_NEEDED = {
    "ratio": "samples a second, to the baseline's",
    "interval": "that of 95 %, as [1.85, 1.97]",
    "device": "what it was measured on",
    "versions": "what it was measured with, as {torch: 2.15.0}",
    "against": "what makes the recipe its baseline again, as {precision: fp32}",
}

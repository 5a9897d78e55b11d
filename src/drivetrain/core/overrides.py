"""The grammar of overrides: one word, read and written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any


def key_of(word: str) -> str:
    """The key or group that an override sets."""
    return word.partition("=")[0].lstrip("+")


def parse(text: str) -> Any:
    """One override as Hydra reads it; `~/` in front of a path is the user's home, as in a shell. Raises HydraException."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    key, equals, value = text.partition("=")
    if equals and value.startswith("~/"):
        text = f"{key}={as_word(os.path.expanduser(value))}"
    return OverridesParser.create().parse_override(text)


def readable(words: Iterable[str], form: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """The words with what Hydra reads in each; of one that it cannot read, `problems` is told the form it should have."""
    from hydra.errors import HydraException

    for word in words:
        try:
            read = parse(word)
        except HydraException:
            problems.append(f"{word!r} is not of the form {form}")
            continue
        yield word, read


def single(words: Iterable[str], whose: str, problems: list[str]) -> dict[str, Any]:
    """Key → value of the words that are a command's own; one of several values is a problem."""
    values: dict[str, Any] = {}
    for word, read in readable(words, "key=value", problems):
        if read.is_sweep_override():
            problems.append(f"'{word}': {key_of(word)} is the {whose}'s own and has one value")
        elif key_of(word) in values:
            problems.append(f"'{word}': {key_of(word)} is given twice: leave one of them out")
        else:
            values[key_of(word)] = read.value()
    return values


def as_word(value: Any) -> str:
    """A plain value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(as_word, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{as_word(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", value):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)

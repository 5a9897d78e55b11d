"""The grammar of overrides: one word, read and written."""

from __future__ import annotations

import os
import re
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

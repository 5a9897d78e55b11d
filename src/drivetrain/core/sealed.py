"""JSON files that end with the SHA-256 of all before it: a damage to one is seen, though no other file has its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

OWN = "own_sha256"


def text(content: Mapping[str, Any]) -> str:
    """Return the text of a sealed file."""
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, OWN: own}, indent=2)


def check(written: str, found: Mapping[str, object]) -> None:
    """Raise ValueError where a byte of a sealed file differs from what was written; `found` is its parsed text."""
    if written != text({key: value for key, value in found.items() if key != OWN}):
        raise ValueError("it is damaged: its SHA-256 differs")

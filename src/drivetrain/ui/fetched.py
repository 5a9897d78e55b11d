"""Shows a recipe that has just been fetched, before anything is made of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from drivetrain.recipe.safe_yaml import printable
from drivetrain.ui.output import echo

if TYPE_CHECKING:
    from drivetrain.recipe.fetch import Fetched

MOST_LINES = 200


def show(address: str, found: Fetched) -> None:
    """Print where it came from, and its text without characters that could steer a terminal, to standard error."""
    via = f" from {' → '.join(dict.fromkeys(found.hosts))}"
    echo(f"fetched {address}{via}, {len(found.content):,} bytes:", file=sys.stderr)
    lines = text(found.content).splitlines()
    for line in lines[:MOST_LINES]:
        echo(f"  {line}".rstrip(), file=sys.stderr)
    if len(lines) > MOST_LINES:
        echo(f"  … and {len(lines) - MOST_LINES:,} more lines: drivetrain recipe show {address}", file=sys.stderr)


def text(content: bytes) -> str:
    """Bytes as text whose lines hold printable characters only."""
    return "\n".join(printable(line) for line in content.decode(errors="replace").splitlines())

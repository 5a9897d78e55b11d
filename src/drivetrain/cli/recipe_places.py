"""`drivetrain recipe show` and `fetch`: the text of a recipe from any place, and the pinned address of one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from drivetrain.core.errors import DONE, UserError
from drivetrain.recipe import fetch, places
from drivetrain.ui import fetched, terminal
from drivetrain.ui.output import echo


def show(argv: Sequence[str]) -> int:
    """Print a recipe's text."""
    if len(argv) != 1:
        raise UserError(f"drivetrain recipe show needs one name, path or address: {', '.join(places.names())}")
    fetch.on_fetch.clear()  # it is printed below
    content = places.load(argv[0])[1]
    shown = fetched.text(content) if terminal.is_live() else content.decode(errors="replace").rstrip("\n")
    echo(shown)
    return DONE


def fetch_address(argv: Sequence[str]) -> int:
    """Fetch a recipe, print it and its pinned address, and run nothing."""
    if len(argv) != 1 or not places.is_address(argv[0]):
        raise UserError("drivetrain recipe fetch needs one address: https://… or hf://OWNER/REPO/FILE")
    pinned = fetch.pin(argv[0])
    places.read(pinned)  # is it a recipe?
    echo(f"drivetrain train {shlex.quote(f'recipe={pinned}')}")
    return DONE

"""Where conf/ and recipes/ are: inside the installed package, else in the checkout."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from drivetrain.errors import UserError

PACKAGE = Path(__file__).resolve().parent


def _shipped(name: str) -> Path:
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent.parent / name


def conf_dir() -> Path:
    """The folder with config.yaml and one folder per group."""
    return _shipped("conf")


def recipes_dir() -> Path:
    """The folder with the recipes that ship."""
    return _shipped("recipes")


def add_own_places(config_dirs: Sequence[str]) -> None:
    """Let the user's own classes be imported: from beside their options, and from here. Raises UserError."""
    missing = [d for d in config_dirs if not Path(d).is_dir()]
    if missing:
        raise UserError(f"--config-dir {d} is no directory" for d in missing)
    for place in (os.getcwd(), *(str(Path(folder).resolve().parent) for folder in config_dirs)):
        if place not in sys.path:
            sys.path.insert(0, place)

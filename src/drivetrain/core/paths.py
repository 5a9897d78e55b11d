"""The folders conf/ and recipes/: inside the installed package, else in the checkout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from drivetrain.core.errors import UserError
from drivetrain.core.process import PACKAGE


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
    """Add the working directory and the parents of `config_dirs` to sys.path, for the user's own classes. Raises UserError."""
    missing = [d for d in config_dirs if not Path(d).is_dir()]
    if missing:
        raise UserError(f"--config-dir {d} is no directory" for d in missing)
    for place in (os.getcwd(), *(str(Path(folder).resolve().parent) for folder in config_dirs)):
        if place not in sys.path:
            sys.path.insert(0, place)


def cannot_be_in(root: Path) -> Iterator[str]:
    """The problems of writing runs below `root` that are visible without creating a file."""
    above = next(p for p in (root, *root.absolute().parents) if os.path.lexists(p))
    if not above.is_dir():
        yield f"output_dir={root}: {above} is no directory: set output_dir to a directory you can write to"
    elif not os.access(above, os.W_OK | os.X_OK):
        yield f"output_dir={root}: {above} may not be written to: set output_dir to a directory you can write to"

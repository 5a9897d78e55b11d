"""The places of conf/ and recipes/: inside the installed package, else in the checkout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from drivetrain.core.errors import refuse
from drivetrain.core.machine.process import PACKAGE


def _shipped(name: str) -> Path:
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent.parent / name


def conf_dir() -> Path:
    """The folder with config.yaml and one folder per group."""
    return _shipped("conf")


def recipes_dir() -> Path:
    """The folder with the shipped recipes."""
    return _shipped("recipes")


def expanded(path: str | Path) -> Path:
    """A path with ~ as the user's home. `Path.expanduser` raises for an unknown user; this leaves the path unchanged."""
    return Path(os.path.expanduser(path))


def user_cache() -> Path | None:
    """The user's cache folder: below $XDG_CACHE_HOME, else ~/.cache.

    None where that is no absolute path: it would differ with the working directory, and could be a stranger's.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "drivetrain"
    return folder if folder.is_absolute() else None


added: set[str] = set()  # added to sys.path by `add_import_paths`: the user's folders, not those of installed packages


def add_import_paths(config_dirs: Sequence[str]) -> None:
    """Make the user's own classes importable from the folder that holds their options' folder. Raises UserError."""
    refuse(f"--config-dir {d} is no directory" for d in config_dirs if not Path(d).is_dir())
    for folder in (str(Path(config_dir).resolve().parent) for config_dir in config_dirs):
        if folder not in sys.path:
            sys.path.insert(0, folder)
            added.add(folder)


def add_working_directory() -> None:
    """Make trusted packages importable from the working directory: last, so that nothing there hides an installed package.

    Without `trust` it is not on the path: it may be a stranger's folder, with an `apex.py` or a `torchao.py` in it.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
        added.add(folder)


def remove_working_directory() -> None:
    """Remove the working directory, which `python -m` puts first on the import path.

    Interpreters that libraries start by -m or -c do not import from there either.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    if not sys.flags.safe_path and sys.path and (not sys.path[0] or sys.path[0] == os.getcwd()):
        del sys.path[0]


def cannot_be_in(root: Path) -> Iterator[str]:
    """The reasons why no run can be written below `root`, found without writing."""
    above = next(p for p in (root, *root.absolute().parents) if os.path.lexists(p))
    if not above.is_dir():
        yield f"output_dir={root}: {above} is no directory: set output_dir to a directory you can write to"
    elif not os.access(above, os.W_OK | os.X_OK):
        yield f"output_dir={root}: {above} may not be written to: set output_dir to a directory you can write to"

"""Installed packages that extend drivetrain: their options, verbs and callbacks, found by entry points.

A package adds options by an entry point with its name, in pyproject.toml, and by a folder `conf/` inside the package,
laid out like drivetrain's own (`conf/<group>/<option>.yaml`):

    [project.entry-points."drivetrain.options"]
    my_pkg = "my_pkg"

A verb of the command line is an entry point in the group `drivetrain.verbs`: `hello = "my_pkg.hello:command"`. A callback is an
entry point in the group `drivetrain.callbacks`: after `watch = "my_pkg.callback:Watch"`, `callbacks=[watch]` names it.

The user has installed the package, so the classes in it that its options name are trusted like drivetrain's
own, without `trust=[my_pkg]`. Shared recipes may choose such options; they can neither install a package nor name a class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, distributions
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from drivetrain.core.machine import paths

OPTIONS, VERBS, CALLBACKS = "drivetrain.options", "drivetrain.verbs", "drivetrain.callbacks"


class Plugin(NamedTuple):
    """A package that adds options."""

    package: str  # the top-level package, whose classes are trusted
    conf: Path  # the folder with one folder per group


def entry_points(group: str) -> list[EntryPoint]:
    """The entry points of a group, in the order of sys.path."""
    return [entry for entry in _installed(_search_path()) if entry.group == group]


def plugins() -> tuple[Plugin, ...]:
    """The installed packages with valid options. `problems` explains the invalid ones."""
    return _plugins(_search_path())[0]


def problems() -> tuple[str, ...]:
    """The problems of the entry points in the group `drivetrain.options`."""
    return _plugins(_search_path())[1]


def trusted_packages() -> frozenset[str]:
    """The top-level packages whose classes a config may name without `trust=`."""
    return frozenset(plugin.package for plugin in plugins())


def _search_path() -> tuple[str, ...]:
    """sys.path without the folders that drivetrain added itself: those hold the user's files, not installed packages."""
    return tuple(folder for folder in sys.path if folder not in paths.added)


@lru_cache(maxsize=4)
def _installed(search_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The entry points for drivetrain of every distribution; the first of a name counts, as for an import."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for distribution in distributions(path=list(search_path)):
        text = distribution.read_text("entry_points.txt") or ""
        if "drivetrain." in text:
            found.setdefault(distribution.name, tuple(distribution.entry_points))
    return tuple(entry for entries in found.values() for entry in entries if entry.group in (OPTIONS, VERBS, CALLBACKS))


@lru_cache(maxsize=4)
def _plugins(search_path: tuple[str, ...]) -> tuple[tuple[Plugin, ...], tuple[str, ...]]:
    """The plugins, and the problems of invalid entry points. No package is imported."""
    found: dict[str, Plugin] = {}
    wrong = []
    for entry in _installed(search_path):
        if entry.group != OPTIONS:
            continue
        owner = entry.dist.name if entry.dist is not None else entry.name
        if entry.pattern.match(entry.value) is None:
            wrong.append(
                f"the installed package {owner} declares options in {entry.value!r}, which is no module name: uninstall {owner}"
            )
            continue
        package, *below = entry.module.split(".")
        spec = _spec(package)
        conf = next((folder for folder in _conf_folders(spec, below) if folder.is_dir()), None)
        if conf is not None:
            found.setdefault(entry.module, Plugin(package, conf))
        else:
            what = f"{entry.module} has no folder conf/" if spec is not None else f"there is no package {package}"
            wrong.append(f"the installed package {owner} declares options in {entry.module}, but {what}: uninstall {owner}")
    return tuple(found.values()), tuple(wrong)


def _spec(package: str) -> ModuleSpec | None:
    try:
        return find_spec(package)
    except (ImportError, ValueError):
        return None


def _conf_folders(spec: ModuleSpec | None, below: list[str]) -> Iterator[Path]:
    """The folders where a package, or a package below it, may hold its conf/."""
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        yield Path(folder).joinpath(*below, "conf")

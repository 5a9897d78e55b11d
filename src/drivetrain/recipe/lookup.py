"""Finds recipes: shipped ones, files, and pinned addresses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.machine.paths import recipes_dir
from drivetrain.core.options.overrides import key_of, parse_each
from drivetrain.recipe import fetch, reader
from drivetrain.recipe.reader import Recipe, RecipeSource
from drivetrain.recipe.safe_yaml import read_bytes

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_address(word: str) -> bool:
    """True if a word is an address, not a name, a path or a setting."""
    return _ADDRESS.match(word) is not None


def names() -> list[str]:
    """The names for recipe=NAME: shipped recipes, and those in ./recipes."""
    return sorted({p.stem for folder in (recipes_dir(), Path("recipes")) for p in folder.glob("*.yaml")})


def read(name: str) -> Recipe:
    """The checked recipe named by `recipe=` or a word of the command line. Raises UserError."""
    path, content = load(name)
    return replace(reader.read(path, content), source=RecipeSource(name, fetch.sha256_of(content)))


def named(overrides: Sequence[str]) -> Recipe | None:
    """The recipe named in overrides; None without one, or for an unreadable one, which composing reports."""
    words = [word for word in overrides if key_of(word) == "recipe"]
    for _, override in parse_each(words[-1:], "recipe=NAME", []):
        if not override.is_sweep_override() and override.value() is not None:
            with suppress(UserError):
                return read(str(override.value()))
    return None


def load(name: str) -> tuple[Path, bytes]:
    """The file of a recipe and its bytes; a fetched one is named by the end of its address. Raises UserError."""
    if is_address(name):
        content = fetch.fetched(name)
        return Path(PurePosixPath(urlsplit(name).path).name or "recipe"), content
    path = _find(name)
    return path, read_bytes(path)


def _find(name: str) -> Path:
    """The file of a recipe: a shipped one, one in ./recipes or next to it, or a path. Raises UserError."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = Path(name)
        if path.is_dir():
            raise UserError(f"recipe={name} is a directory: name the recipe.yaml in it")
        if not path.is_file():
            raise UserError(f"recipe={name}: there is no such file")
        return path
    for folder in (recipes_dir(), Path("recipes"), Path()):
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    raise UserError(
        f"recipe={name} is not known; it may be a name, a path that ends in .yaml, or an address: {did_you_mean(name, names())}"
    )

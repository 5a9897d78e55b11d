"""The two configs that are bisected: a run's directory, a recipe, or a list of overrides, and what is put on top of GOOD."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.config.catalog import LISTS
from drivetrain.config.hydra_idioms import recipe_word, translated
from drivetrain.core.errors import UserError
from drivetrain.core.overrides import key_of
from drivetrain.core.paths import expanded
from drivetrain.launch.job import Job, is_of_this_user, of_run, recorded_environment, recorded_settings
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure.overrides import apply
from drivetrain.recipe import places


@dataclass
class Side:
    """GOOD or BAD: its name as it was given, and its overrides, which for a run come on top of its own config."""

    name: str
    overrides: list[str]
    config_dirs: Sequence[str]
    run_dir: Path | None = None
    recorded: dict[str, Any] = field(default_factory=dict)  # of a run of this user: its environment.json

    def job(self, changes: Sequence[str] = ()) -> Job:
        """The job with these overrides on top. Raises UserError."""
        given = self.changed(changes)
        if self.run_dir is None:
            return prepare_job(given, self.config_dirs)
        dirs = self.config_dirs or self.recorded.get("config_dirs", [])
        return of_run(self.run_dir, given, dirs, recorded_settings(self.recorded, given))

    def changed(self, changes: Sequence[str]) -> list[str]:
        """The side's overrides with these on top; a list of options, as surgery=[…], has all keys of its items."""
        keys = {key_of(change) for change in changes}
        below = tuple(f"{key}." for key in keys if key in LISTS or "." in key)
        kept = [override for override in self.overrides if not key_of(override).startswith(below)]
        return apply(kept, changes, self.config_dirs)


def read(word: str, overrides: Sequence[str], config_dirs: Sequence[str]) -> Side:
    """What a word of the command line names, with the overrides that both sides have. Raises UserError."""
    path = expanded(word)
    if "=" in word and not _is_path(path) and not places.is_address(word):
        own = translated(_words(word), config_dirs)
        if wrong := [override for override in own if "=" not in override]:
            raise UserError(f"'{wrong[0]}' in '{word}' is not of the form key=value")
        return Side(word, [*own, *overrides], config_dirs)
    if path.is_dir():
        recorded = recorded_environment(path)
        return Side(word, [*overrides], config_dirs, path, recorded if is_of_this_user(recorded) else {})
    name = recipe_word(word, config_dirs)
    places.load(name.strip("'"))
    return Side(word, [f"recipe={name}", *overrides], config_dirs)


def _is_path(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a list of overrides that is too long for a file's name
        return False


def _words(word: str) -> list[str]:
    """The overrides in a quoted list; quotes within them are the shell's. Raises UserError."""
    try:
        return shlex.split(word)
    except ValueError as error:
        raise UserError(f"'{word}' is no list of overrides: {error}") from None

"""Recipes of older forms, brought to the present one by small functions, one for each schema.

A recipe without `schema:` was written by hand or before there was one: there only names are replaced that no option has any
more (tests/config/test_renamed.py), so that a recipe of today means the same with or without the line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from drivetrain.recipe.header import SCHEMA

if TYPE_CHECKING:
    from drivetrain.recipe.reader import Recipe

RENAMED = {  # before schema 1: former key, or group=option → the present one
    "batch.steps": "batch.accumulation_steps",
    "optimizer.lr_of": "optimizer.lr_multipliers",
    "optimizer.no_decay": "optimizer.no_weight_decay",
    "parallel.silent_s": "parallel.heartbeat_timeout_s",
    "debug=sync": "debug=host_sync",
}


def migrate(recipe: Recipe, problems: list[str]) -> None:
    """Bring a recipe that was just read to the present form. What was changed is added to its notices."""
    for schema in range(recipe.header.schema or 0, SCHEMA):
        MIGRATIONS[schema](recipe, problems)


def _from_0(recipe: Recipe, problems: list[str]) -> None:
    rename(recipe, RENAMED, problems)


def rename(recipe: Recipe, names: dict[str, str], problems: list[str]) -> None:
    """Replace former names of keys (with all that is below them) and of options."""
    for former, present in names.items():
        group, is_option, option = former.partition("=")
        if is_option:
            _rename_option(recipe, group, option, present.partition("=")[2])
        else:
            _rename_key(recipe, former, present, problems)


def _rename_option(recipe: Recipe, group: str, former: str, present: str) -> None:
    def renamed(choice: Any) -> Any:
        return [*map(renamed, choice)] if isinstance(choice, list) else present if choice == former else choice

    for section in (recipe.choices, recipe.sweep):
        if group in section and (choice := renamed(section[group])) != section[group]:
            section[group] = choice
            _tell(recipe, group, f"{group}={former}", f"{group}={present}")


def _rename_key(recipe: Recipe, former: str, present: str, problems: list[str]) -> None:
    for section in (recipe.values, recipe.sweep):
        for key in [key for key in section if key == former or key.startswith(f"{former}.")]:
            new = present + key.removeprefix(former)
            if new in section:
                problems.append(f"{recipe.where(key)}: '{key}' is called {new} now, which is given too: leave one of them out")
                continue
            recipe.lines[new] = recipe.lines[key]
            section[new] = section.pop(key)
            if key in recipe.unchanged:
                recipe.unchanged = recipe.unchanged - {key} | {new}
            _tell(recipe, key, key, new)
    stages = recipe.values.get("stages")
    for stage in [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else ():
        for key in [key for key in stage if key == former or key.startswith(f"{former}.")]:
            stage[present + key.removeprefix(former)] = stage.pop(key)
            _tell(recipe, "stages", key, present)


def _tell(recipe: Recipe, key: str, former: str, present: str) -> None:
    recipe.notices.append(f"{recipe.where(key)}: {former} is called {present} now, and is read as that")


MIGRATIONS: dict[int, Callable[[Recipe, list[str]], None]] = {0: _from_0}  # schema → the function that makes the next one of it

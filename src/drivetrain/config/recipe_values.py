"""What of a recipe holds beside what the command line chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drivetrain.config.catalog import LISTS, one_or_several, option_keys
from drivetrain.recipe.reader import Recipe, holds_for


def for_task(recipe: Recipe, task: Any, notices: list[str]) -> Recipe:
    """The recipe; for another task than its own without what was merely a default, for that task has defaults of its own."""
    own = recipe.choices.get("task", task)
    if task is None or own == task or not recipe.unchanged:
        return recipe
    notices.append(
        f"recipe {recipe.name} was written for task={own}, and the command line chose task={task}: "
        f"of the recipe only what was chosen holds, and not the defaults of task={own}"
    )
    return recipe.only_chosen()


def drop_those_of_other_options(
    recipe: Recipe, values: dict[str, Any], chosen: dict[str, Any], given: dict[str, Any], config_dirs: Sequence[str]
) -> list[str]:
    """Where the command line chose another option than the recipe, keep those of the recipe's `values` that it has too.

    Returns a notice for each such group. Values that were mere defaults of the recipe's option go without a word.
    """
    chosen = {group: one_or_several(group, option) for group, option in chosen.items()}
    for key in [key for key in values if key in recipe.unchanged and not holds_for(key, recipe.choices, chosen)]:
        del values[key]
    notices = []
    for group, option in chosen.items():
        mine = [key for key in values if key.split(".")[0] == group and key not in given and key not in recipe.unchanged]
        own = recipe.choices.get(group, option)
        if own == option or not mine:
            continue
        names = {*map(str, option)} if group in LISTS else option_keys(group, option, config_dirs)
        dropped = [key for key in mine if key.split(".")[1] not in names]
        kept = [f"{key}={values[key]}" for key in mine if key not in dropped]
        for key in dropped:
            del values[key]
        outcome = [f"keeps {', '.join(kept)}"] * bool(kept) + [f"leaves out {', '.join(dropped)}"] * bool(dropped)
        notices.append(
            f"recipe {recipe.name} was written for {group}={own}, and the command line chose {group}={option}: "
            f"of the recipe's values the run {' and '.join(outcome)}"
        )
    return notices

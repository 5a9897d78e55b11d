"""The values of a recipe that still apply with the command line's choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drivetrain.config.catalog import one_or_several, still_applies
from drivetrain.core.typed import JsonMapping, JsonObject
from drivetrain.recipe.reader import Recipe, holds_for
from drivetrain.recipe.safe_yaml import REFERENCE

MAX_SIZE = 20_000  # characters of resolved references: a few levels of them can multiply to billions
MAX_STEPS = 8  # from reference to reference


def problems(recipe: Recipe, values: Mapping[str, object], config: JsonMapping) -> Iterator[str]:
    """The references among a recipe's values that resolve to too much text. Called before the config is resolved.

    `compose` reports references to missing keys.
    """
    for key, value in values.items():
        if recipe.values.get(key) is value and _stand_for_too_much(str(value), config):
            yield f"{recipe.where(key)}: {key}: its references expand too far, or form a circle: write the value out"


def _stand_for_too_much(text: str, config: JsonMapping) -> bool:
    """True if the references in a text expand beyond MAX_SIZE, or take more than MAX_STEPS steps, as in a circle."""

    def meant(name: str) -> str:
        found: Any = config
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return str(found)

    for _ in range(MAX_STEPS + 1):
        names = REFERENCE.findall(text)
        if not names or len(text) + sum(len(meant(name)) for name in names) > MAX_SIZE:
            return bool(names)
        text = REFERENCE.sub(lambda found: meant(found[1]), text)
    return True


def followed(value: object, config: JsonObject) -> object:
    """A value of a recipe with its references resolved; unchanged where a key is missing."""
    if "${" not in str(value):
        return value
    try:
        made = OmegaConf.create({"value": value}, parent=OmegaConf.create(config))
        return dict(OmegaConf.to_container(made, resolve=True))["value"]  # type: ignore[arg-type]
    except OmegaConfBaseException:
        return value


def for_task(recipe: Recipe, task: object, notices: list[str]) -> Recipe:
    """The recipe. For another task than its own it loses the values that were mere defaults, because that task has its own."""
    own = recipe.choices.get("task", task)
    if task is None or own == task or not recipe.unchanged:
        return recipe
    notices.append(
        f"recipe {recipe.name} was written for task={own}, and the command line chose task={task}: "
        f"of the recipe only explicit values hold, not the defaults of task={own}"
    )
    return recipe.only_chosen()


def drop_those_of_other_options(
    recipe: Recipe, values: JsonObject, chosen: JsonObject, given: JsonObject, config_dirs: Sequence[str]
) -> list[str]:
    """Drop the recipe's `values` that the command line's other choice of an option lacks.

    Returns a notice for each such group. Mere defaults of the recipe's option are dropped silently.
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
        dropped = [key for key in mine if not still_applies(key, chosen, config_dirs)]
        kept = [f"{key}={values[key]}" for key in mine if key not in dropped]
        for key in dropped:
            del values[key]
        outcome = [f"keeps {', '.join(kept)}"] * bool(kept) + [f"leaves out {', '.join(dropped)}"] * bool(dropped)
        notices.append(
            f"recipe {recipe.name} was written for {group}={own}, and the command line chose {group}={option}: "
            f"of the recipe's values the run {' and '.join(outcome)}"
        )
    return notices

"""The values of a recipe that hold beside what the command line chose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drivetrain.config.catalog import one_or_several, still_applies
from drivetrain.core.typed import JsonObject
from drivetrain.recipe.reader import Recipe, holds_for
from drivetrain.recipe.safe_yaml import REFERENCE

MAX_SIZE = 20_000  # values and characters of what a reference stands for: a few levels of references can multiply to billions
MAX_STEPS = 8  # from reference to reference


class _TooMuch(Exception):
    """A reference stands for more than MAX_SIZE, or goes on for more than MAX_STEPS, as one in a circle does."""


def problems(recipe: Recipe, values: Mapping[str, object], config: DictConfig) -> Iterator[str]:
    """The references among a recipe's values that stand for too much. It is asked before the config is resolved.

    A reference to a key that is not there is composing's to report.
    """
    own = {key: value for key, value in values.items() if recipe.values.get(key) is value and "${" in str(value)}
    sizes = _Sizes(OmegaConf.to_container(config)) if own else None
    for key, value in own.items():
        try:
            assert sizes is not None
            sizes.of_value(value)
        except _TooMuch:
            yield f"{recipe.where(key)}: {key}: its references stand for too much, or go round in a circle: write the value out"


class _Sizes:
    """The sizes of a config's values with what they refer to."""

    def __init__(self, config: object) -> None:
        self.config = config
        self.known: dict[str, tuple[int, int]] = {}

    def of_value(self, value: object, above: int = 0) -> tuple[int, int]:
        """The values and characters of `value` with what it refers to, and the steps to the end of its references.

        `above` is the number of steps that led to it. Raises _TooMuch.
        """
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        found = [self.of_value(part, above) for part in parts]
        if isinstance(value, str):
            found += [self._of_name(name, above + 1) for name in REFERENCE.findall(value)]
        size = 1 + len(value if isinstance(value, str) else "") + sum(size for size, _ in found)
        steps = max((steps for _, steps in found), default=0)
        if size > MAX_SIZE or steps > MAX_STEPS:
            raise _TooMuch
        return size, steps

    def _of_name(self, name: str, above: int) -> tuple[int, int]:
        if above > MAX_STEPS:
            raise _TooMuch
        if name not in self.known:
            value = self.config
            for part in name.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            size, steps = self.of_value(value, above)
            self.known[name] = size, steps + 1
        return self.known[name]


def followed(value: object, config: DictConfig) -> object:
    """A value of a recipe, with what its references stand for; as it is where there is no such key."""
    if "${" not in str(value):
        return value
    try:
        made = OmegaConf.create({"value": value}, parent=config)
        return dict(OmegaConf.to_container(made, resolve=True))["value"]  # type: ignore[arg-type]
    except OmegaConfBaseException:
        return value


def for_task(recipe: Recipe, task: object, notices: list[str]) -> Recipe:
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
    recipe: Recipe, values: JsonObject, chosen: JsonObject, given: JsonObject, config_dirs: Sequence[str]
) -> list[str]:
    """Keep those of the recipe's `values` that the command line's option has too, where it chose another one than the recipe.

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

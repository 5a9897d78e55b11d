"""Reads `stages`, the parts of a run with changes of its config up to a boundary, and composes the config of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import pairwise

from drivetrain.config.catalog import options, root_config
from drivetrain.config.compose import compose
from drivetrain.config.composed import Composed, flatten
from drivetrain.core.errors import UserError
from drivetrain.core.options.horizon import length_problem
from drivetrain.core.options.option import Length, Option
from drivetrain.core.typed import JsonMapping, JsonObject

LARGEST = 32  # stages of a run
UNTIL = "until"


@dataclass
class Planned:
    """A stage before its options exist."""

    label: str  # for messages
    until: Length | None
    changes: JsonObject
    composed: Composed


def plan(composed: Composed, base_of: Mapping[str, type[Option]], problems: list[str]) -> list[Planned]:
    """The composed stages of a config, or []. `base_of`: group → its base class.

    If the last one has an `until`, a stage with the run's own config follows.
    """
    given: list[JsonMapping] = composed.plain["stages"] or []
    where = composed.where("stages")
    if len(given) > LARGEST:
        problems.append(f"{where}stages: a run has at most {LARGEST} stages, and these are {len(given)}")
        return []
    found = []
    for number, stage in enumerate([*given, *([{}] if given and given[-1].get(UNTIL) is not None else [])]):
        label, before = f"stages[{number}]" if number < len(given) else "the rest of the run", len(problems)
        changes = flatten({key: value for key, value in stage.items() if key != UNTIL})
        until = stage.get(UNTIL)
        problems += [where + problem for problem in _until_problems(label, until, number < len(given) - 1)]
        refusals = (_refusal(key, value, base_of) for key, value in changes.items())
        problems += [f"{where}{label}: {why}" for why in refusals if why]
        if len(problems) == before and (its_config := _composed(composed, changes, f"{where}{label}: ", problems)) is not None:
            found.append(Planned(label, until, changes, its_config))
    return found if len(found) >= len(given) else []


def _until_problems(label: str, until: object, needed: bool) -> Iterator[str]:
    if until is None:
        if needed:
            yield f"{label} has no until: give a share of the run (0.4), epochs (5ep) or updates (500); only the last needs none"
    elif isinstance(until, bool) or not isinstance(until, int | float | str):
        yield f"{label}.until={until}: give a share of the run (0.4), epochs (5ep) or updates (500)"
    else:
        yield from length_problem(f"{label}.until", until)


def _refusal(key: str, value: object, base_of: Mapping[str, type[Option]]) -> str:
    """The reason why no stage may change a key; "" if it may, or if composing finds no such key."""
    group, _, setting = key.partition(".")
    if group == "stages":
        return "a stage cannot have stages"
    if group not in base_of:
        if group in root_config():
            return f"{key}={value}: it applies to the whole run: set it outside of stages"
        return f"there is no '{key}': did you mean '{UNTIL}'?" if get_close_matches(group, [UNTIL]) else ""
    base = base_of[group]
    if base.stage_option if not setting else any(fnmatchcase(setting, pattern) for pattern in base.stage_keys):
        return ""
    may = [f"{group}.{pattern}" for pattern in base.stage_keys if pattern != "*"]
    of_group = f" (of {group} a stage may change {', '.join(may)})" if may else ""
    if base.stage_keys == ("*",):
        of_group = f" (a stage may change the keys of {group}, not the option)"
    return f"{key}={value} cannot change in the middle of a run: {base.why_fixed}{of_group}: set it outside of stages"


def _composed(whole: Composed, changes: Mapping[str, object], label: str, problems: list[str]) -> Composed | None:
    """The run's config with these changes. Their problems are added to `problems`."""
    recipe, groups = whole.recipe, options(whole.config_dirs)
    if recipe is not None and "stages" in recipe.values:  # keys forbidden to the recipe are forbidden in its stages too
        recipe = recipe.cell(dict(changes), groups)
    try:
        found = compose(whole.overrides, whole.config_dirs, recipe, {**changes, "stages": None})
    except UserError as error:
        problems += [label + problem for problem in error.problems if problem not in problems]
        return None
    wrong = [problem for problem in found.problems if problem not in whole.problems]
    problems += [label + problem for problem in wrong]
    return None if wrong else found


def repeated(stages: Sequence[Planned]) -> Iterator[str]:
    """A line for each stage with the same config as the stage before."""
    for before, stage in pairwise(stages):
        if before.composed.plain == stage.composed.plain:
            yield (f"{before.label} and {stage.label} have the same config: nothing changes at until={before.until}")

"""Every combination of the given values: the jobs of a sweep, composed and checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.config.catalog import options
from drivetrain.core.errors import UserError
from drivetrain.core.overrides import format_value, key_of, parse_each
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.recipe import reader as recipes


@dataclass
class SweepJob:
    """One combination: the words that differ from job to job, all its words, and what came of checking them."""

    label: str
    words: list[str]
    job: Job | None
    problems: list[str]
    cell: dict[str, Any] = field(default_factory=dict)  # what a recipe's `sweep:` gave it: the last of the words, too


def prepare(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> list[SweepJob]:
    """A job for each combination of the values given, in Hydra's sweep grammar; a recipe's `sweep:` joins in."""
    axes, labelled = _axes(overrides)
    jobs = []
    for words in itertools.product(*axes):
        label = [w for w, differs in zip(words, labelled, strict=True) if differs]
        jobs += [prepare_one(label, words, cell, config_dirs) for cell in _cells(words, config_dirs)]
    return jobs


def prepare_one(
    label: Sequence[str], words: Sequence[str], cell: dict[str, Any] | None = None, config_dirs: Sequence[str] = ()
) -> SweepJob:
    """One job of these words, none of which sweeps, and of this cell of its recipe's `sweep:`."""
    cell = cell or {}
    recipe = _recipe_of(words)
    of_cell = recipe.cell(cell, options(config_dirs)) if recipe is not None and recipe.sweep else None
    extra = [f"{k}={format_value(v)}" for k, v in cell.items()]
    made = SweepJob(" ".join([*label, *extra]), [*words, *extra], None, [], cell)
    try:
        made.job = prepare_job(words, config_dirs, of_cell, extra)
    except UserError as error:
        made.problems = error.problems
    return made


def _axes(overrides: Sequence[str]) -> tuple[list[list[str]], list[bool]]:
    """The words of each override, one or several, and whether they differ from job to job."""
    from hydra.core.override_parser.types import ValueType

    axes: list[list[str]] = []
    labelled: list[bool] = []
    problems: list[str] = []
    for text, override in parse_each(overrides, "key=value, group=option or key=value,value", problems):
        labelled.append(override.is_sweep_override())
        if not override.is_sweep_override():
            axes.append([text])
        elif override.value_type in (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP, ValueType.RANGE_SWEEP):
            axes.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            problems.append(
                f"'{text}': a sweep goes through values that are listed: write them out as a,b,c or range(1,4), "
                "or search by -m hydra/sweeper=optuna"
            )
    if problems:
        raise UserError(problems)
    return axes, labelled


def _cells(words: Sequence[str], config_dirs: Sequence[str]) -> Iterator[dict[str, Any]]:
    recipe = _recipe_of(words)
    if recipe is None or not recipe.sweep:
        yield {}
    else:
        yield from (cell for cell, _ in recipe.cells(options(config_dirs), given={key_of(w) for w in words}))


def _recipe_of(words: Sequence[str]) -> recipes.Recipe | None:
    """The recipe that is named, if there is one that can be read: what is wrong with it is told where it is composed."""
    name = next((w.partition("=")[2].strip("'\"") for w in words if key_of(w) == "recipe"), "null")
    try:
        return recipes.read(recipes.find(name)) if name not in ("", "null") else None
    except UserError:
        return None


def is_sweep_recipe(overrides: Sequence[str]) -> bool:
    """Whether `recipe=…` among the overrides names a recipe with a grid: it runs as a sweep without -m."""
    recipe = _recipe_of(overrides)
    return recipe is not None and bool(recipe.sweep)

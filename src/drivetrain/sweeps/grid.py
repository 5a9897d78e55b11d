"""The jobs of a sweep: every combination of the given values, composed and validated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.config.catalog import options
from drivetrain.core.errors import UserError
from drivetrain.core.overrides import format_value, key_of, parse_each
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.recipe import places
from drivetrain.recipe.reader import Recipe

MAX_JOBS = 10_000  # of a sweep
HOPELESS = 50  # jobs of which none can run


@dataclass
class SweepJob:
    """One combination: its job, or why that cannot run."""

    label: str  # the overrides that differ from job to job
    overrides: list[str]
    job: Job | None
    problems: list[str]
    cell: dict[str, Any] = field(default_factory=dict)  # values from a recipe's `sweep:`, also the last of the overrides


def prepare(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> list[SweepJob]:
    """A job for each combination of the values given in Hydra's sweep grammar, and of the grid in a recipe's `sweep:`."""
    axes, labelled = _axes(overrides)
    if (count := math.prod(map(len, axes))) > MAX_JOBS:
        raise UserError(f"the sweep has {count:,} combinations, and at most {MAX_JOBS:,} are possible: sweep over fewer values")
    jobs: list[SweepJob] = []
    for combination in itertools.product(*axes):
        label = [override for override, differs in zip(combination, labelled, strict=True) if differs]
        for cell in _cells(combination, config_dirs):
            jobs.append(prepare_one(label, combination, cell, config_dirs))
            _refuse_hopeless(jobs)
    return jobs


def _refuse_hopeless(jobs: Sequence[SweepJob]) -> None:
    """Raise UserError where none of the first jobs can run: to compose hundreds more would take minutes, and say the same."""
    if len(jobs) > MAX_JOBS:
        raise UserError(f"the sweep has more than {MAX_JOBS:,} jobs: sweep over fewer values")
    if len(jobs) == HOPELESS and not any(job.job for job in jobs):
        problems = dict.fromkeys(problem for job in jobs for problem in job.problems)
        raise UserError([*problems, f"none of the first {HOPELESS} jobs of this sweep can run: the others were not tried"])


def prepare_one(
    label: Sequence[str], overrides: Sequence[str], cell: dict[str, Any] | None = None, config_dirs: Sequence[str] = ()
) -> SweepJob:
    """One job of these overrides, each with one value, and of this cell of its recipe's `sweep:`."""
    cell = cell or {}
    recipe = _recipe_of(overrides)
    of_cell = recipe.cell(cell, options(config_dirs)) if recipe is not None and recipe.sweep else None
    extra = [f"{k}={format_value(v)}" for k, v in cell.items()]
    made = SweepJob(" ".join([*label, *extra]), [*overrides, *extra], None, [], cell)
    try:
        made.job = prepare_job(overrides, config_dirs, of_cell, extra)
    except UserError as error:
        made.problems = error.problems
    return made


def _axes(overrides: Sequence[str]) -> tuple[list[list[str]], list[bool]]:
    """For each override the single-value overrides that it stands for, and whether it sweeps over several."""
    axes: list[list[str]] = []
    sweeps: list[bool] = []
    problems: list[str] = []
    for text, override in parse_each(overrides, "key=value, group=option or key=value,value", problems):
        sweeps.append(override.is_sweep_override())
        if not override.is_sweep_override():
            axes.append([text])
        elif getattr(override.value(), "shuffle", False):
            problems.append(
                f"'{text}': a sweep runs its jobs in the order that is given, so that it can be resumed: leave out shuffle"
            )
        else:
            try:
                values = listed(text, override, MAX_JOBS)
            except UserError as error:
                problems += error.problems
                continue
            if key_of(text) == "recipe":  # an address needs no quotes
                values = [value.strip("'\"") for value in values]
            axes.append([f"{override.get_key_element()}={value}" for value in values])
    if problems:
        raise UserError(problems)
    return axes, sweeps


def listed(text: str, override: Any, most: int) -> list[str]:
    """The values that an override lists in Hydra's sweep grammar. Raises UserError where they are none, or more than `most`."""
    from hydra.core.override_parser.types import ValueType

    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        raise UserError(f"'{text}': glob() chooses among the options of a group, and {key_of(text)} is none")
    if override.value_type is ValueType.INTERVAL_SWEEP:
        raise UserError(
            f"'{text}': a sweep goes through listed values: write them out as a,b,c or range(1,4), "
            "or search by -m hydra/sweeper=optuna"
        )
    try:
        values = [str(value) for value in itertools.islice(override.sweep_string_iterator(), most + 1)]
    except (ValueError, ArithmeticError) as error:  # Hydra's own: range(1,4,0)
        raise UserError(f"'{text}' is no sweep: {error}") from None
    if len(values) > most:
        raise UserError(f"'{text}' has more than {most:,} values, the most that are possible: list fewer")
    return values


def _cells(overrides: Sequence[str], config_dirs: Sequence[str]) -> Iterator[dict[str, Any]]:
    recipe = _recipe_of(overrides)
    if recipe is None or not recipe.sweep:
        yield {}
    else:
        yield from (cell for cell, _ in recipe.cells(options(config_dirs), given={key_of(o) for o in overrides}))


def _recipe_of(overrides: Sequence[str]) -> Recipe | None:
    """The recipe that the overrides name; None if it cannot be read, which is reported where the job is composed."""
    name = next((o.partition("=")[2].strip("'\"") for o in overrides if key_of(o) == "recipe"), "null")
    try:
        return places.read(name) if name not in ("", "null") else None
    except UserError:
        return None


def is_sweep_recipe(overrides: Sequence[str]) -> bool:
    """Whether `recipe=…` among the overrides names a recipe with a grid, which runs as a sweep without -m."""
    recipe = _recipe_of(overrides)
    return recipe is not None and bool(recipe.sweep)

"""Is a recipe valid? The configs that it stands for are composed and validated."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.config.catalog import options
from drivetrain.config.compose import compose
from drivetrain.core.errors import OperatorGives, UserError
from drivetrain.launch.job import checked
from drivetrain.recipe.reader import Recipe
from drivetrain.run import drift

MOST = 32  # combinations of a sweep, of which a file of a few bytes may have a thousand


def check(recipe: Recipe, config_dirs: Sequence[str] = (), words: Sequence[str] = ()) -> list[str]:
    """Validate the recipe, the baseline of its claim, and its sweep's combinations. Raises UserError.

    `words` are overrides to check it with, such as the `trust` that own code needs. Of a large sweep some combinations are
    validated, which have each value where there are few. Returns what the user should know, a line each: how many they are,
    what is left to the command line, and what has changed since the recipe was written.
    """
    groups = options(config_dirs)
    every = list(recipe.cells(groups))
    first = every[0][0]
    one_apart = [row for row in every if sum(row[0][key] is not value for key, value in first.items()) <= 1]
    chosen = every if len(every) <= MOST else one_apart[:MOST]
    said = [f"{len(chosen)} of its {len(every)} combinations were checked"] if len(chosen) < len(every) else []
    parts = [cell for _, cell in chosen]
    if recipe.claim is not None and recipe.claim.speed is not None:
        parts.append(recipe.baseline(groups))
    for part in parts:
        said += _check_one(part, config_dirs, words)
    return list(dict.fromkeys(said))


def _check_one(recipe: Recipe, config_dirs: Sequence[str], words: Sequence[str]) -> list[str]:
    """Validate one config; return notices, and what it lacks and no recipe may set, such as the path of its data."""
    try:
        job = checked(compose(words, config_dirs, base=recipe))
    except UserError as error:
        if others := [problem for problem in error.problems if not isinstance(problem, OperatorGives)]:
            raise UserError(others) from None
        return [f"left to the command line: {problem}" for problem in error.problems]
    return [*job.composed.notices, *drift.notices(job.shared, config_dirs, job.run.values["trust"])]

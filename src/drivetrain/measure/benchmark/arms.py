"""The arms of a comparison before they run: a label, overrides, and the job that they compose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from drivetrain.core.errors import UserError
from drivetrain.core.overrides import key_of
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure.overrides import groups_of
from drivetrain.recipe.reader import Recipe

NO_SAVING = ("saving=none",)  # of every arm whose overrides do not name saving: it leaves no checkpoints behind


@dataclass
class ArmSpec:
    """An arm to run: its label and its job, or why it cannot run."""

    label: str
    overrides: list[str]
    job: Job | None
    problems: list[str] = field(default_factory=list)


def without_saving(overrides: Sequence[str]) -> list[str]:
    """The overrides, and saving=none where they do not name saving."""
    return [*overrides, *(() if "saving" in groups_of(overrides) else NO_SAVING)]


def compose(
    label: str,
    overrides: Sequence[str],
    config_dirs: Sequence[str] = (),
    recipe: Recipe | None = None,
    own_saving: bool = False,
) -> ArmSpec:
    """Compose an arm from its overrides, and from a recipe that has been read already, if given.

    It does not save, unless its overrides name saving or `own_saving` keeps the run's own.
    """
    given = [*overrides] if own_saving else without_saving(overrides)
    try:
        return ArmSpec(label, given, prepare_job(given, config_dirs, recipe))
    except UserError as error:
        return ArmSpec(label, given, None, error.problems)


def baseline_job(specs: Sequence[ArmSpec]) -> Job:
    """The job of the first arm, which the others are compared to. Raises UserError if that cannot run."""
    if (job := specs[0].job) is None:
        label = specs[0].label
        raise UserError([f"the first arm ({label}) is what the others are compared to: {p}" for p in specs[0].problems])
    return job


def refuse_resume(command: str, overrides: Sequence[str]) -> None:
    """Raise UserError for resume=…, because measuring starts every run at its beginning."""
    if any(key_of(override) == "resume" for override in overrides):
        raise UserError(f"drivetrain {command} measures runs from their beginning: leave resume= out")

"""The variants of a comparison before they run: a label, overrides, and the job that they compose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from drivetrain.config.catalog import still_applies
from drivetrain.config.compose import compose as compose_config
from drivetrain.core.errors import UserError
from drivetrain.core.overrides import key_of
from drivetrain.launch.job import Job, device_problems
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure.changes import groups_of
from drivetrain.recipe.reader import Recipe
from drivetrain.sweeps import store
from drivetrain.sweeps.store import SweepJob

# Of every variant whose overrides do not name saving: it leaves no checkpoints behind. One that cannot run without them
# keeps the run's own saving.
NO_SAVING = ("saving=none",)


@dataclass
class VariantSpec(SweepJob):
    """A variant to run: its label and its job, or why it cannot run."""

    composes: Callable[[Sequence[str]], Job] | None = None  # makes its job of overrides, where it is not `prepare_job`

    def again(self, words: Sequence[str]) -> Job:
        """The variant's job with these overrides in place of its own of the same keys. Raises UserError."""
        job, replaced = baseline_job([self]), {key_of(word) for word in words}
        given = [*(word for word in self.overrides if key_of(word) not in replaced), *words]
        try:
            if self.composes is not None:
                return self.composes(given)
            return prepare_job(given, job.composed.config_dirs, job.composed.recipe)
        except UserError as error:
            raise UserError([f"{self.label}: {problem}" for problem in error.problems]) from None


def without_saving(overrides: Sequence[str]) -> list[str]:
    """The overrides, and saving=none where they do not name saving."""
    return [*overrides, *(() if "saving" in groups_of(overrides) else NO_SAVING)]


def prepare_without_saving(
    overrides: Sequence[str], config_dirs: Sequence[str] = (), recipe: Recipe | None = None
) -> tuple[list[str], Job]:
    """Overrides and job of a run that does not save, or saves as it would where it needs that. Raises UserError."""
    given = without_saving(overrides)
    try:
        return given, prepare_job(given, config_dirs, recipe)
    except UserError:
        if given == [*overrides]:
            raise
    return [*overrides], prepare_job(overrides, config_dirs, recipe)  # its problems are those of the run, not of saving=none


def compose(
    label: str,
    overrides: Sequence[str],
    config_dirs: Sequence[str] = (),
    recipe: Recipe | None = None,
    own_saving: bool = False,
) -> VariantSpec:
    """Compose a variant from its overrides, and from a recipe that has been read already, if given.

    It does not save, unless its overrides name saving, it cannot run without, or `own_saving` keeps the run's own.
    """
    try:
        if own_saving:
            return VariantSpec(label, [*overrides], prepare_job(overrides, config_dirs, recipe))
        return VariantSpec(label, *prepare_without_saving(overrides, config_dirs, recipe))
    except UserError as error:
        return VariantSpec(label, [*overrides], None, error.problems)


def baseline_job(specs: Sequence[VariantSpec]) -> Job:
    """The job of the first variant, which the others are compared to. Raises UserError if that cannot run."""
    if (job := specs[0].job) is None:
        label = specs[0].label
        raise UserError([f"the first variant ({label}) is what the others are compared to: {p}" for p in specs[0].problems])
    return job


def refuse_bad(specs: Sequence[VariantSpec]) -> None:
    """Raise UserError with the problems of all variants that cannot run, before the first one starts."""
    problems = [problem for spec in specs for problem in spec.problems]
    if problems := problems or device_problems(spec.job for spec in specs):
        raise UserError(dict.fromkeys(problems))


def swept(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> tuple[list[VariantSpec], list[str]]:
    """A variant for each combination of the values that the overrides give, and what the user should know of them, in lines.

    A word such as optimizer.momentum=0.9 goes to the variants whose option has that key; the others run without it. Where one
    cannot run without saving, all save as the run does, so that they do the same work.
    """
    jobs = _prepared(overrides, config_dirs)
    homes = {word: variants for word in _of_options(jobs) if 0 < len(variants := _with_key(word, jobs, config_dirs)) < len(jobs)}
    found: list[SweepJob] = []
    notes = []
    for number, job in enumerate(jobs):
        foreign = [word for word in job.overrides if number not in homes.get(word, [number])]
        if foreign:
            words = [word for word in job.overrides[: len(job.overrides) - len(job.cell)] if word not in foreign]
            job = store.prepare_one([w for w in job.label.split() if w in words], words, job.cell, config_dirs)
            if any(job.overrides == other.overrides for other in found):
                continue
            notes.append(f"{' '.join(foreign)} is not for the variant {job.label}, whose option has no such key: it runs without")
        found.append(job)
    return [VariantSpec(**vars(job)) for job in found], notes


def _prepared(overrides: Sequence[str], config_dirs: Sequence[str]) -> list[SweepJob]:
    """The jobs of all combinations, without saving where each can do without."""
    jobs = store.prepare(without_saving(overrides), config_dirs)
    if all(job.job is not None for job in jobs):
        return jobs
    saving = store.prepare(overrides, config_dirs)
    needed = any(job.job is None and other.job is not None for job, other in zip(jobs, saving, strict=True))
    return saving if needed else jobs


def _of_options(jobs: Sequence[SweepJob]) -> list[str]:
    """The words of variants that cannot run which set a key of some option."""
    words = dict.fromkeys(word for job in jobs if job.job is None for word in job.overrides)
    return [word for word in words if "." in key_of(word)]


def _with_key(word: str, jobs: Sequence[SweepJob], config_dirs: Sequence[str]) -> list[int]:
    """The numbers of the variants whose chosen options have the key that a word sets."""
    key, group = key_of(word), key_of(word).partition(".")[0]
    choices = [_choices([w for w in job.overrides if "." not in key_of(w)], config_dirs) for job in jobs]
    return [n for n, chosen in enumerate(choices) if group in chosen and still_applies(key, chosen, config_dirs)]


def _choices(overrides: Sequence[str], config_dirs: Sequence[str]) -> Mapping[str, object]:
    """Group → option of these overrides; {} where they cannot be composed, which is reported where the variant is."""
    try:
        return compose_config(overrides, config_dirs).choices
    except UserError:
        return {}


def refuse_resume(command: str, overrides: Sequence[str]) -> None:
    """Raise UserError for resume=…, because measuring starts every run at its beginning."""
    if any(key_of(override) == "resume" for override in overrides):
        raise UserError(f"drivetrain {command} measures runs from their beginning: leave resume= out")

"""The variants of a comparison: composing them, training them with paired seeds, and reading trained runs.

A run is read as the figures and facts in its files. The files may be anybody's, so values of a wrong type are left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from drivetrain.config.catalog import still_applies
from drivetrain.config.compose import compose as compose_config
from drivetrain.core.errors import Interrupted, UserError, printable, refuse
from drivetrain.core.machine import accelerators
from drivetrain.core.machine.signals import SignalForwarder
from drivetrain.core.options.overrides import format_value, key_of
from drivetrain.core.options.selection import SETS, Reach, handed_on
from drivetrain.core.typed import JsonObject, is_number
from drivetrain.launch.job import Job, device_problems
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.launch.launcher import in_new_interpreter
from drivetrain.measure.changes import groups_of
from drivetrain.measure.intervals import Interval, ratio
from drivetrain.recipe.reader import Recipe
from drivetrain.recipe.sections import MAX_CHARACTERS
from drivetrain.run import directory
from drivetrain.run.reader import RunFiles, read
from drivetrain.run.result import Result
from drivetrain.sweeps import store
from drivetrain.sweeps.launchers import run_one
from drivetrain.sweeps.store import SweepJob

# For every variant whose overrides do not set saving: it leaves no checkpoints. A variant that cannot run without them keeps the
# run's own saving.
NO_SAVING = ("saving=none",)


@dataclass
class VariantSpec(SweepJob):
    """A variant to run: its label and its job, or the reason why it cannot run."""

    composes: Callable[[Sequence[str]], Job] | None = None  # makes its job from overrides, if not `prepare_job`

    def again(self, words: Sequence[str]) -> Job:
        """The variant's job with these overrides, which replace its own of the same keys. Raises UserError."""
        job, replaced = baseline_job([self]), {key_of(word) for word in words}
        given = [*(word for word in self.overrides if key_of(word) not in replaced), *words]
        try:
            if self.composes is not None:
                return self.composes(given)
            return prepare_job(given, job.composed.config_dirs, job.composed.recipe)
        except UserError as error:
            raise UserError([f"{self.label}: {problem}" for problem in error.problems]) from None


def without_saving(overrides: Sequence[str]) -> list[str]:
    """The overrides, with saving=none if they do not set saving."""
    return [*overrides, *(() if "saving" in groups_of(overrides) else NO_SAVING)]


def prepare_without_saving(
    overrides: Sequence[str], config_dirs: Sequence[str] = (), recipe: Recipe | None = None
) -> tuple[list[str], Job]:
    """Overrides and job of a run that does not save, or keeps its saving if it needs it. Raises UserError."""
    given = without_saving(overrides)
    try:
        return given, prepare_job(given, config_dirs, recipe)
    except UserError:
        if given == [*overrides]:
            raise
    return [*overrides], prepare_job(overrides, config_dirs, recipe)  # reports the run's own problems, not those of saving=none


def compose(
    label: str,
    overrides: Sequence[str],
    config_dirs: Sequence[str] = (),
    recipe: Recipe | None = None,
    own_saving: bool = False,
) -> VariantSpec:
    """Compose a variant from its overrides, and from a recipe that was already read, if given.

    It does not save, unless its overrides set saving, it cannot run without, or `own_saving` is true.
    """
    try:
        if own_saving:
            return VariantSpec(label, [*overrides], prepare_job(overrides, config_dirs, recipe))
        return VariantSpec(label, *prepare_without_saving(overrides, config_dirs, recipe))
    except UserError as error:
        return VariantSpec(label, [*overrides], None, error.problems)


def baseline_job(specs: Sequence[VariantSpec]) -> Job:
    """The job of the first variant, the baseline. Raises UserError if it cannot run."""
    if (job := specs[0].job) is None:
        label = specs[0].label
        raise UserError([f"the first variant ({label}) is what the others are compared to: {p}" for p in specs[0].problems])
    return job


def refuse_bad(specs: Sequence[VariantSpec]) -> None:
    """Raise UserError with the problems of all variants that cannot run, before the first one starts."""
    problems = [problem for spec in specs for problem in spec.problems]
    refuse(problems or device_problems(spec.job for spec in specs))


def swept(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> tuple[list[VariantSpec], list[str]]:
    """A variant for each combination of the overrides' values, and notices for the user.

    A word such as optimizer.momentum=0.9 goes to the variants whose option has that key; the others run without it. If one
    cannot run without saving, all save like the run, so that they do the same work.
    """
    jobs = _prepared(overrides, config_dirs)
    chosen = [_choices(job, config_dirs) for job in jobs] if any(job.job is None for job in jobs) else []
    found: list[SweepJob] = []
    notes = []

    def has(number: int, word: str) -> bool:
        """True if a chosen option of a variant has the key of a word."""
        key = key_of(word)
        return key.partition(".")[0] in chosen[number] and still_applies(key, chosen[number], config_dirs)

    for number, job in enumerate(jobs):
        given = [word for word in job.overrides if "." in key_of(word)] if job.job is None else []
        foreign = [word for word in given if not has(number, word) and any(has(n, word) for n in range(len(jobs)))]
        if foreign:
            words = [word for word in job.overrides[: len(job.overrides) - len(job.cell)] if word not in foreign]
            job = store.prepare_one([w for w in job.label.split() if w in words], words, job.cell, config_dirs)
            if any(job.overrides == other.overrides for other in found):
                continue
            notes.append(f"{' '.join(foreign)} is not for the variant {job.label}, whose option has no such key: it runs without")
        found.append(job)
    return [VariantSpec(**vars(job)) for job in found], notes


def _prepared(overrides: Sequence[str], config_dirs: Sequence[str]) -> list[SweepJob]:
    """The jobs of all combinations, without saving if all can run without it."""
    jobs = store.prepare(without_saving(overrides), config_dirs)
    if all(job.job is not None for job in jobs):
        return jobs
    saving = store.prepare(overrides, config_dirs)
    needed = any(job.job is None and other.job is not None for job, other in zip(jobs, saving, strict=True))
    return saving if needed else jobs


def _choices(job: SweepJob, config_dirs: Sequence[str]) -> Mapping[str, object]:
    """Group → option of a variant; {} if they cannot be composed, which is reported with the variant."""
    try:
        return compose_config([word for word in job.overrides if "." not in key_of(word)], config_dirs).choices
    except UserError:
        return {}


MEBIBYTE = 2**20


@dataclass
class Facts:
    """Of one training with one seed; None where the run did not measure it."""

    seed: int
    set: str = "test"  # that judges the run
    figures: dict[str, dict[str, float]] = field(default_factory=dict)  # set → metric → its value at the end
    # Since the first record, without start-up, which differs between a forked process and a separate interpreter.
    # None: never reached, or no target was set.
    seconds_to_target: float | None = None
    updates_to_target: int | None = None
    reach: str | None = None  # the target, as accuracy>=0.98
    peak_mib: float | None = None  # None also on a CPU whose process did other work before the run
    joules: float | None = None
    data: JsonObject | None = None  # its fingerprint
    kind: str | None = None  # the device's type
    device: str | None = None  # its name
    resumed: bool = False  # several parts: times, memory and energy do not belong to one training
    error: str | None = None  # the reason why it did not complete
    fold: int = 0

    @classmethod
    def of(cls, run: RunFiles, seed: int, fold: int = 0, reach: Reach | None = None) -> Facts:
        """The facts of a run's files."""
        found, result = cls(seed, fold=fold), run.result
        if result is None or run.status != "completed":
            lines = str((result.error if result else "") or "no error message").splitlines()
            found.error = text(f"{run.status}: {lines[0] if lines else ''}")
        if result is None:
            return found
        found.kind, found.device = text(result.device), text(result.device_name or result.device)
        found.resumed = result.resumed_at is not None
        found.data = result.data if isinstance(result.data, dict) else None
        sets = result.metrics if isinstance(result.metrics, dict) else {}
        found.set = next((name for name in SETS if name in sets), "test")
        found.figures = {name: final_figures(sets.get(name)) for name in SETS if name in sets}
        if not found.resumed:
            peak = number(result.peak_memory_bytes) if result.own_process or result.device != "cpu" else None
            found.peak_mib = peak / MEBIBYTE if peak else None
            found.joules = number(result.energy_joules)
        found.reach = str(reach) if reach is not None else None
        if reach is not None and (reached := run.first_reaching(reach.metric, reach.reached)) is not None:
            found.updates_to_target = reached[1]
            found.seconds_to_target = None if found.resumed else reached[0]
        return found


def final_figures(of_set: object) -> dict[str, float]:
    """The final figures of a run on a set."""
    final = of_set.get("final") if isinstance(of_set, dict) else None
    found = handed_on({str(name): value for name, value in final.items()}) if isinstance(final, dict) else {}
    return {name: value for name, each in found.items() if (value := number(each)) is not None}


def number(value: Any) -> float | None:
    """The value, if it is a finite number."""
    return float(value) if is_number(value) and math.isfinite(value) else None


def text(value: object) -> str | None:
    """The value as a text that is safe to show and to write into a claim."""
    return printable(str(value)).strip()[:MAX_CHARACTERS] or None if value is not None else None


@dataclass
class TrainedRun:
    """One variant trained with one seed."""

    seed: int
    samples: int
    figures: dict[str, float] = field(default_factory=dict)  # by name
    censored: list[str] = field(default_factory=list)  # figures that are lower bounds: the time to a target never reached
    error: str | None = None
    facts: Facts | None = None  # further facts from its files


TRAINING_LOSS = "training loss"


def seconds_to(reach: Reach | str) -> str:
    """The name of the figure with a run's time to its target."""
    return f"seconds to {reach}"


def trained_run(run: RunFiles, seed: int, fold: int = 0, reach: Reach | None = None) -> TrainedRun:
    """The judged figures in a run's files."""
    samples = run.train.samples[-1] if run.train.samples else 0
    facts = Facts.of(run, seed, fold, reach)
    if run.result is None or facts.error is not None:
        return TrainedRun(seed, samples, error=facts.error, facts=facts)
    trained = TrainedRun(seed, samples, final_figures(run.result.metrics.get(run.result.judged_by)), facts=facts)
    # Each recorded loss is the mean over the samples since the preceding record.
    points = zip(run.train.samples, [0, *run.train.samples], run.train.curve("loss"), strict=False)
    losses = [(now - before, loss) for now, before, loss in points if loss is not None]
    total = sum(count for count, _ in losses)
    trained.figures[TRAINING_LOSS] = sum(count * loss for count, loss in losses) / total if total else math.nan
    if reach is not None:  # the whole run's seconds, with start-up and compiling
        arrived = (run.result.target or {}).get("seconds")
        trained.figures[seconds_to(reach)] = run.result.wall_s if arrived is None else arrived
        trained.censored = [] if arrived is not None else [seconds_to(reach)]
    return trained


MIN_SEEDS = 3  # for an interval


@dataclass
class TimesToTarget:
    """The times when the seeds of a candidate reached the target: seconds and updates of each, None for a seed that did not."""

    label: str
    seconds: list[float | None] = field(default_factory=list)
    updates: list[int | None] = field(default_factory=list)

    @classmethod
    def of(cls, label: str, runs: Sequence[TrainedRun], target: str) -> TimesToTarget:
        """The times of these runs; a failed one did not reach it."""
        name, found = seconds_to(target), cls(label)
        for run in runs:
            there = run.error is None and name not in run.censored
            found.seconds.append(run.figures.get(name) if there else None)
            found.updates.append(run.facts.updates_to_target if there and run.facts is not None else None)
        return found

    @property
    def reached(self) -> int:
        """The number of seeds that reached it."""
        return sum(value is not None for value in self.seconds)

    @property
    def median(self) -> float:
        """The median of the seconds; a seed that did not reach the target counts as infinite."""
        values = [math.inf if value is None else value for value in self.seconds]
        return statistics.median(values) if values else math.inf

    def faster_than(self, base: TimesToTarget) -> Interval | None:
        """The speed relative to another one, over the seeds where both reached the target; None for too few."""
        pairs = [(b, s) for b, s in zip(base.seconds, self.seconds, strict=False) if b is not None and s is not None]
        return ratio([b for b, _ in pairs], [s for _, s in pairs]) if len(pairs) >= MIN_SEEDS else None

    @property
    def rank(self) -> tuple[float, float]:
        """Its rank among variants, lowest is best: more seeds that reached the target, then less time."""
        return -self.reached / max(1, len(self.seconds)), self.median

    @property
    def when(self) -> str:
        """The median of the seconds in words."""
        return f"{self.median:.1f} s" if math.isfinite(self.median) else "not reached"


def columns(variants: Sequence[TimesToTarget], base: TimesToTarget, target: str) -> dict[str, list[str]]:
    """The columns of a table: the seeds that reached the target, their times, and the speed relative to `base`."""
    made = [[n for n in variant.updates if n is not None] for variant in variants]
    faster = [variant.faster_than(base) if variant is not base else None for variant in variants]
    return {
        "reached": [f"{variant.reached} of {len(variant.seconds)}" for variant in variants],
        f"time to {target}": [variant.when for variant in variants],
        "updates to it": [f"{statistics.median(found):,.0f}" if found else "–" for found in made],
        "sooner": [str(found) if found else "–" for found in faster],
    }


def proven(variants: Sequence[TimesToTarget]) -> int | None:
    """The number of the soonest variant, if it is certainly sooner than the first and loses no seed; else None."""
    best = min(range(len(variants)), key=lambda n: variants[n].rank)
    of_base = sum(value is not None for value in variants[0].seconds[: len(variants[best].seconds)])
    faster = variants[best].faster_than(variants[0]) if best and variants[best].reached >= of_base else None
    return best if faster is not None and faster.low > 1 else None


# By the variant's config, the seed and the fold.
Trained = dict[tuple[str, int, int | None], TrainedRun]


class Train(Protocol):
    """Trains a variant with a seed, once, and removes the run's files."""

    def __call__(self, spec: VariantSpec, seed: int, alone: bool = False, fold: int | None = None) -> TrainedRun:
        """`alone`: in a new interpreter, with only the run's memory; a forked process shares this one's."""


@contextmanager
def trainings(
    verb: str,
    first: Job,
    reach: Reach | None = None,
    progress: Callable[..., None] = lambda *_: None,
    known: Trained | None = None,
    sets_target: bool = True,
) -> Iterator[Train]:
    """Yield the function that trains variants, in a folder below the output_dir of `first` that is removed at the end.

    `reach` is a target whose time is read from the runs; with `sets_target` it is set for all of them. `known` are runs that
    need not be repeated. A variant's advice is shown with its first seed only. A signal is forwarded to the run and raises
    Interrupted; a variant that cannot be composed raises UserError.
    """
    accelerators.find()  # once here, with the import of torch, because the runs are forked
    told = set[str]()
    runs: Trained = {} if known is None else known
    with directory.working(Path(first.run.values["output_dir"]) / verb) as folder, SignalForwarder() as signals:
        place = folder / "run"

        def train(spec: VariantSpec, seed: int, alone: bool = False, fold: int | None = None) -> TrainedRun:
            key = (str(baseline_job([spec]).composed.plain), seed, fold)
            if key in runs:
                return runs[key]
            progress(f"training {spec.label or 'the first variant'}: seed {seed}")
            words = [f"runtime.seed={seed}", f"output_dir={format_value(str(folder))}"]
            words += [f"data.fold={fold}"] if fold is not None else []
            job = spec.again([*words, *([f"target={format_value(str(reach))}"] if reach is not None and sets_target else [])])
            job.told = spec.label in told
            if alone:
                words = ["--quiet", *job.composed.overrides, f"hydra.run.dir={format_value(str(place))}"]
                errors = in_new_interpreter("drivetrain.cli.child", words, job.composed.config_dirs, signals, quiet=True)
                result = Result.read(place) or Result(error="; ".join(errors))
            else:
                told.add(spec.label)
                result = run_one(replace(spec, overrides=job.composed.overrides, job=job), place, signals, quiet=True)
            if signals.raised:
                raise Interrupted("stopped by a signal while variants were trained")
            runs[key] = trained_run(replace(read(place), result=result, status=result.status), seed, fold or 0, reach)
            directory.remove(place)
            return runs[key]

        yield train


def in_turns(variants: Sequence[int], number: int) -> Sequence[int]:
    """The order of training variants with the seed of this number: it spreads a machine's drift over the variants."""
    return variants if number % 2 == 0 else variants[::-1]

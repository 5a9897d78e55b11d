"""The comparison of several arms: runs the interleaved benchmark, and holds its results and their table."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.core import accelerators
from drivetrain.core.errors import UserError
from drivetrain.core.option import Count, Positive
from drivetrain.core.signals import ended_by_signals
from drivetrain.measure.benchmark import noninferiority, quality
from drivetrain.measure.benchmark.arms import ArmSpec, baseline_job
from drivetrain.measure.benchmark.interleave import Arm, StagedArm, StoppingRule, run_rounds
from drivetrain.measure.benchmark.row import Row, precise, updates_of
from drivetrain.measure.intervals import Interval, ratio
from drivetrain.run import directory, environment
from drivetrain.ui.progress import Steps

MIN_SEEDS = 3  # for a verdict


@dataclass
class Settings(quality.Plan):
    """The settings of `drivetrain compare`."""

    rounds: Count = 20  # at most, each with fresh processes; with fewer than 6 there is no interval
    block_s: Positive = 0.4  # seconds of a timed block; two blocks for each round and arm
    quality: bool = False  # also train each arm to its end, with several seeds


@dataclass
class TimesToTarget:
    """When the seeds of a candidate reached the target: seconds and updates of each, None where one did not."""

    label: str
    seconds: list[float | None] = field(default_factory=list)
    updates: list[int | None] = field(default_factory=list)

    @property
    def reached(self) -> int:
        """How many seeds reached it."""
        return self.reached_of(len(self.seconds))

    def reached_of(self, seeds: int) -> int:
        """How many of the first `seeds` reached it."""
        return sum(value is not None for value in self.seconds[:seeds])

    @property
    def median(self) -> float:
        """The median of the seconds; a seed that did not reach the target counts as endlessly long."""
        values = [math.inf if value is None else value for value in self.seconds]
        return statistics.median(values) if values else math.inf

    def faster_than(self, base: TimesToTarget) -> Interval | None:
        """How many times as fast as another one it is, over the seeds where both reached the target; None for too few."""
        pairs = [(b, s) for b, s in zip(base.seconds, self.seconds, strict=False) if b is not None and s is not None]
        return ratio([b for b, _ in pairs], [s for _, s in pairs]) if len(pairs) >= MIN_SEEDS else None

    @property
    def when(self) -> str:
        """The median of the seconds in words."""
        return f"{self.median:.1f} s" if math.isfinite(self.median) else "not reached"


def columns(arms: Sequence[TimesToTarget], base: TimesToTarget, target: str) -> dict[str, list[str]]:
    """The columns of a table: how many seeds reached the target, when, and how much sooner than those of `base`."""
    made = [[n for n in arm.updates if n is not None] for arm in arms]
    faster = [arm.faster_than(base) if arm is not base else None for arm in arms]
    return {
        "reached": [f"{arm.reached} of {len(arm.seconds)}" for arm in arms],
        f"time to {target}": [arm.when for arm in arms],
        "updates to it": [f"{statistics.median(found):,.0f}" if found else "–" for found in made],
        "sooner": [str(found) if found else "–" for found in faster],
    }


def ranked(arms: Sequence[TimesToTarget]) -> list[TimesToTarget]:
    """The arms, the soonest first: more seeds that reached the target, then less time. None is left out."""
    return sorted(arms, key=lambda arm: (-arm.reached / max(1, len(arm.seconds)), arm.median))


def proven(arms: Sequence[TimesToTarget]) -> TimesToTarget | None:
    """The soonest arm, where it is sooner than the first one beyond doubt and no seed of it is lost; None: nothing is kept."""
    base, best = arms[0], ranked(arms)[0]
    faster = best.faster_than(base) if best is not base and best.reached >= base.reached_of(len(best.seconds)) else None
    return best if faster is not None and faster.low > 1 else None


@dataclass
class Comparison:
    """The results of all arms, the first of which is the baseline."""

    rows: list[Row]
    notes: list[str]
    overrides: list[str]
    settings: Settings
    environment: dict[str, Any]
    seconds: float
    subject: str = "{}"  # what a sentence calls an arm, with its label in the place of {}
    target: str | None = None  # such as accuracy>=0.98: the arms are ranked by their time to it

    @property
    def failed(self) -> bool:
        """Whether any arm has an error."""
        return any(row.error for row in self.rows)

    def raise_if_baseline_failed(self) -> None:
        """Raise UserError where the first arm has an error: the others have nothing to be compared to."""
        first = self.rows[0]
        if first.error is not None:
            name = first.label or "the run as it is"
            raise UserError(f"the first arm ({name}) is what the others are compared to, and it ended: {first.error}")

    def times(self) -> list[TimesToTarget]:
        """When each arm's seeds reached the target."""
        return [_times_of(row, self.target or "") for row in self.rows]

    def order(self) -> list[int]:
        """The numbers of the rows: as they were given, or with a target the soonest there first."""
        if self.target is None:
            return list(range(len(self.rows)))
        times = self.times()
        return [next(n for n, each in enumerate(times) if each is arm) for arm in ranked(times)]

    def as_dict(self) -> dict[str, Any]:
        """The content of compare.json: an interval is [estimate, low, high], and null where there were too few rounds."""
        content = asdict(self)
        for row in content["rows"]:
            for name in ("ratio", "whole_run"):
                if row[name] and not row[name].low:
                    row[name] = [row[name].middle, None, None]
        content["order"] = self.order()
        return content


def measure(
    specs: Sequence[ArmSpec],
    settings: Settings,
    overrides: Sequence[str],
    stopping_rule: StoppingRule = precise,
    trained: quality.Trained | None = None,
) -> Comparison:
    """Run the arms in interleaved rounds, then train them to their ends if the settings ask for quality.

    `overrides` are recorded as what all arms have in common, and `trained` are runs that need no training again. Raises
    UserError if the first arm cannot be built; one that fails later is a row with its error, and ends the measurement.
    """
    first = baseline_job(specs)
    accelerators.find()  # this, and the import of torch, once here, because the arms are forked
    began = time.perf_counter()
    folder = directory.create(Path(first.run.values["output_dir"]), "compare", "arms")
    with Steps() as steps, ended_by_signals() as raise_if_interrupted:

        def progress(text: str, seconds_left: float | None = None) -> None:
            raise_if_interrupted()
            steps(text, seconds_left)

        try:
            arms = [arm_of(s, folder / str(n)) for n, s in enumerate(specs)]
            runnable = [arm for arm in arms if arm is not None]
            run_rounds(runnable, settings.rounds, settings.block_s, progress, stopping_rule)
        finally:
            directory.remove(folder)
        rows = [Row.of(spec, arm, runnable[0]) for spec, arm in zip(specs, arms, strict=True)]
        if settings.quality and rows[0].error is None:
            add_verdicts(rows, specs, settings, progress, trained)
    reach = quality.reach_of(settings, first.run) if settings.quality else None
    target = str(reach) if reach is not None else None
    for row, arm in zip(rows, arms, strict=True):
        if arm is not None:
            row.weigh(arm, rows[0], _updates_to(target, row) or updates_of(arm.job, row.samples))
    facts = environment.describe(list(overrides), first.config_hash, {})
    notes = [*_without_effect(runnable), *_unequal_work(runnable), *_together(rows)]
    seconds = time.perf_counter() - began
    return Comparison(rows, notes, list(overrides), settings, facts, seconds, target=target)


def _times_of(row: Row, target: str) -> TimesToTarget:
    """When the seeds of an arm reached a target; a run that failed did not."""
    name, found = quality.seconds_to(target), TimesToTarget(row.label)
    for run in row.verdict.runs if row.verdict is not None else ():
        there = run.error is None and name not in run.censored
        found.seconds.append(run.figures.get(name) if there else None)
        found.updates.append(run.facts.updates_to_target if there and run.facts is not None else None)
    return found


def _updates_to(target: str | None, row: Row) -> int | None:
    """The updates after which an arm's seeds reached the target, their median; None where one of them did not."""
    found = _times_of(row, target).updates if target is not None else []
    reached = [updates for updates in found if updates is not None]
    return round(statistics.median(reached)) if reached and len(reached) == len(found) else None


def arm_of(spec: ArmSpec, folder: Path) -> Arm | None:
    """The arm of a spec; None where it has no job to run."""
    if spec.job is None:
        return None
    return (StagedArm if spec.job.run.stages else Arm)(spec.label, spec.job, folder)


def add_verdicts(
    rows: Sequence[Row],
    specs: Sequence[ArmSpec],
    plan: quality.Plan,
    progress: Callable[..., None],
    trained: quality.Trained | None = None,
) -> None:
    """Train the arms with several seeds, and set each row's verdict on quality."""
    for row, verdict in zip(rows, quality.judge(specs, plan, progress, trained), strict=True):
        row.verdict = verdict


def _together(rows: Sequence[Row]) -> list[str]:
    """A note on what the verdicts of several arms, and of several looks at their seeds, hold for together."""
    verdicts = [row.verdict for row in rows[1:] if row.verdict is not None]
    if not verdicts:
        return []
    arms = f"all {len(verdicts)} variants (Holm) and " if len(verdicts) > 1 else ""
    return [
        f"quality: PASS and FAIL are each decided at a level of {100 * noninferiority.ALPHA:g} % for {arms}"
        "all looks at the seeds together (alpha spending)"
    ]


def _without_effect(arms: Sequence[Arm]) -> list[str]:
    """A note for each arm whose precision does less on this machine than its name says."""
    return [f"{arm.label}: {arm.facts['notice']}" for arm in arms if arm.facts.get("notice")]


def _unequal_work(arms: Sequence[Arm]) -> list[str]:
    """A note for each amount of work that is not the same for all arms."""
    notes = []
    for fact, meaning in (("global_batch", "samples in an update"), ("samples", "samples to train on")):
        found: dict[int, list[str]] = {}
        for arm in arms:
            if fact in arm.facts:
                found.setdefault(arm.facts[fact], []).append(arm.label)
        if len(found) > 1:
            each = "; ".join(f"{number:,} ({', '.join(labels)})" for number, labels in found.items())
            notes.append(f"the variants do not do the same work. {meaning.capitalize()}: {each}")
    return notes

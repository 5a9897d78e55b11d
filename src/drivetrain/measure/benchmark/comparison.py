"""The comparison of several arms: runs the interleaved benchmark, and holds its results and their table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.core import accelerators
from drivetrain.core.errors import UserError
from drivetrain.core.horizon import run_horizon
from drivetrain.core.option import Count, Positive
from drivetrain.core.signals import ended_by_signals
from drivetrain.measure.benchmark import noninferiority, quality, stopping
from drivetrain.measure.benchmark.arms import ArmSpec, baseline_job
from drivetrain.measure.benchmark.interleave import Arm, StagedArm, StoppingRule, run_rounds
from drivetrain.measure.benchmark.times_to_target import TimesToTarget, ranked
from drivetrain.measure.cells import figure
from drivetrain.measure.intervals import Interval, ratio
from drivetrain.run import directory, environment
from drivetrain.ui.progress import Steps


@dataclass
class Settings(quality.Plan):
    """The settings of `drivetrain compare`."""

    rounds: Count = 20  # at most, each with fresh processes; with fewer than 6 there is no interval
    block_s: Positive = 0.4  # seconds of a timed block; two blocks for each round and arm
    quality: bool = False  # also train each arm to its end, with several seeds


@dataclass
class Row:
    """One arm's results; a figure is null where the arm failed before it was measured."""

    label: str
    overrides: list[str]
    error: str | None = None
    ratio: Interval | None = None  # samples a second relative to the first arm
    samples_per_second: float | None = None
    step_ms_p50: float | None = None
    step_ms_p95: float | None = None
    data_wait: float | None = None  # share of the time
    peak_memory_bytes: int | None = None
    compile_s: float | None = None
    pays_after: int | None = None  # updates until the time to compile has been saved
    run_updates: int | None = None  # of the whole run; null where that is not known
    global_batch: int | None = None
    samples: int | None = None  # in the training set
    device: str | None = None
    device_type: str | None = None
    rates: list[float] = field(default_factory=list)  # samples a second of each round
    stopped_after: int | None = None  # rounds, where the stopping rule ended the arm
    out_of_time: bool = False  # whether it ended the arm because the time was over, and not because it was behind
    verdict: noninferiority.Verdict | None = None

    @classmethod
    def of(cls, spec: ArmSpec, arm: Arm | None, base: Arm) -> Row:
        """The results of an arm; `base` is the first arm, and `arm` is None where it could not run."""
        if arm is None:
            return cls(spec.label, spec.overrides, error="; ".join(spec.problems))
        facts = {name: arm.facts.get(name) for name in ("compile_s", "global_batch", "samples", "device", "device_type")}
        row = cls(spec.label, spec.overrides, arm.error, stopped_after=arm.stopped_after, **facts)  # type: ignore[arg-type]
        if arm.error is not None or not arm.blocks:
            return row
        row.rates = [block.rate for block in arm.blocks]
        steps = sorted(1e3 * seconds for block in arm.blocks for seconds in block.step_s)
        row.samples_per_second = statistics.median(row.rates)
        row.step_ms_p50, row.step_ms_p95 = statistics.median(steps), steps[min(len(steps) - 1, int(0.95 * len(steps)))]
        row.data_wait = sum(b.data_wait_s for b in arm.blocks) / sum(b.seconds for b in arm.blocks)
        row.peak_memory_bytes = arm.blocks[-1].peak_memory
        if arm is base:
            row.ratio = Interval(1.0, 1.0, 1.0)
        elif base.error is None:
            base_rates = [block.rate for block in base.blocks]
            row.ratio = ratio(row.rates, base_rates[: len(row.rates)])
            if row.compile_s:
                saved_s = 1 / statistics.median(base_rates) - 1 / row.samples_per_second  # of each sample
                extra_s = row.compile_s - (base.facts.get("compile_s") or 0.0)
                row.pays_after = max(0, round(extra_s / saved_s / arm.facts["global_batch"])) if saved_s > 0 else None
        return row

    @property
    def pays_too_late(self) -> str:
        """Why the arm makes the run no shorter although its updates are faster; "" where nothing tells that."""
        if self.pays_after is None or self.run_updates is None or self.pays_after < self.run_updates:
            return ""
        return f"{self.label}: compiling pays after {self.pays_after:,} updates, and this run has {self.run_updates:,}"

    def cells(self, first: bool) -> list[str]:
        """The figures as text; `first`: this is the first arm, which has no interval."""
        return [
            figure(self.samples_per_second, "{:,.0f}"),
            figure(self.ratio.middle if self.ratio else None, "{:.2f} ×"),
            "–" if first else self._interval(),
            figure(self.step_ms_p50, "{:.2f} ms"),
            figure(self.step_ms_p95, "{:.2f} ms"),
            figure(100 * self.data_wait if self.data_wait is not None else None, "{:.0f} %"),
            figure(self.peak_memory_bytes / 2**30 if self.peak_memory_bytes else None, "{:.2f} GiB"),
            figure(self.compile_s, "{:.1f} s"),
            figure(self.pays_after, "{:,} updates"),
        ]

    def _interval(self) -> str:
        if self.ratio is None:
            return "–"
        if not self.ratio.low:
            why = "out of time" if self.out_of_time else "dropped"
            rounds = f"{len(self.rates)} round{'s' * (len(self.rates) != 1)}"
            return f"{why} after {rounds}" if self.stopped_after else "too few rounds"
        conclusion = "" if self.ratio.differs else "  no difference" if self.ratio.same else "  not distinguishable"
        return f"{self.ratio.low:.3f} – {self.ratio.high:.3f}{conclusion}"


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
            if row["ratio"] and not row["ratio"].low:
                row["ratio"] = [row["ratio"].middle, None, None]
        content["order"] = self.order()
        return content

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of the table, without the columns that no arm has a figure for."""
        header = [
            "arm", "samples/s", "speed", "95 % interval", "update, median", "95th percentile", "waiting for data", "memory",
            "compiling", "pays after",
        ]  # fmt: skip
        rows = [[row.label, *row.cells(first=not n)] for n, row in enumerate(self.rows)]
        if self.target is not None:
            times = self.times()
            header[1:1] = ["reached", f"time to {self.target}", "updates to it", "sooner"]
            for cells, arm in zip(rows, times, strict=True):
                cells[1:1] = arm.cells(times[0])[1:]
        if self.settings.quality:
            header += ["claims to be", "seeds", "no worse?", "because"]
            for cells, row in zip(rows, self.rows, strict=True):
                cells += _quality(row.verdict)
        if self.failed:
            header.append("error")
            for cells, row in zip(rows, self.rows, strict=True):
                cells.append(row.error or "")
        used = [n for n in range(len(header)) if n < 4 or any(cells[n] not in ("–", "") for cells in rows)]
        return [header[n] for n in used], [[cells[n] for n in used] for cells in rows]


def measure(
    specs: Sequence[ArmSpec],
    settings: Settings,
    overrides: Sequence[str],
    stopping_rule: StoppingRule = stopping.precise,
    trained: quality.Trained | None = None,
) -> Comparison:
    """Run the arms in interleaved rounds, then train them to their ends if the settings ask for quality.

    `overrides` are recorded as what all arms have in common, and `trained` are runs that need no training again. Raises
    UserError if the first arm cannot be built; one that fails later is a row with its error, and ends the measurement.
    """
    first = baseline_job(specs)
    accelerators.find()  # this, and the import of torch, once here, because the arms are forked
    began = time.perf_counter()
    root = Path(first.run.values["output_dir"])
    folder = directory.create(root, "compare", "arms")
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
        for row, spec in zip(rows, specs, strict=True):
            row.run_updates = _updates_of(spec, row)
        if settings.quality and rows[0].error is None:
            add_verdicts(rows, specs, settings, root, progress, trained)
    reach = quality.reach_of(settings, first.run) if settings.quality else None
    facts = environment.describe(list(overrides), first.config_hash, {})
    late = [f"{row.pays_too_late}: it does not shorten the run" for row in rows[1:] if row.pays_too_late]
    notes = [*_without_effect(runnable), *_unequal_work(runnable), *late, *_together(rows)]
    seconds = time.perf_counter() - began
    return Comparison(rows, notes, list(overrides), settings, facts, seconds, target=str(reach) if reach is not None else None)


def _times_of(row: Row, target: str) -> TimesToTarget:
    """When the seeds of an arm reached a target; a run that failed did not."""
    name, found = quality.seconds_to(target), TimesToTarget(row.label)
    for run in row.verdict.runs if row.verdict is not None else ():
        there = run.error is None and name not in run.censored
        found.seconds.append(run.figures.get(name) if there else None)
        found.updates.append(run.facts.updates_to_target if there and run.facts is not None else None)
    return found


def _updates_of(spec: ArmSpec, row: Row) -> int | None:
    """The updates of an arm's whole run over the data that it was measured with; None where they are not known."""
    over = run_horizon(spec.job.run, row.samples) if spec.job is not None else None
    return over.updates if over is not None else None


def arm_of(spec: ArmSpec, folder: Path) -> Arm | None:
    """The arm of a spec; None where it has no job to run."""
    if spec.job is None:
        return None
    return (StagedArm if spec.job.run.stages else Arm)(spec.label, spec.job, folder)


def add_verdicts(
    rows: Sequence[Row],
    specs: Sequence[ArmSpec],
    plan: quality.Plan,
    root: Path,
    progress: Callable[..., None],
    trained: quality.Trained | None = None,
) -> None:
    """Train the arms with several seeds, and set each row's verdict on quality."""
    for row, verdict in zip(rows, quality.judge(specs, plan, root, progress, trained), strict=True):
        row.verdict = verdict


def _quality(verdict: noninferiority.Verdict | None) -> list[str]:
    """The cells of a row's verdict."""
    if verdict is None:
        return ["–", "–", "–", ""]
    effect = "–" if verdict.outcome == noninferiority.FIRST else verdict.effect
    return [effect, str(len(verdict.runs)), verdict.outcome, verdict.reason]


def _together(rows: Sequence[Row]) -> list[str]:
    """A note on what the verdicts of several arms, and of several looks at their seeds, hold for together."""
    verdicts = [row.verdict for row in rows[1:] if row.verdict is not None]
    if not verdicts:
        return []
    arms = f"all {len(verdicts)} arms (Holm) and " if len(verdicts) > 1 else ""
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
            notes.append(f"the arms do not do the same work. {meaning.capitalize()}: {each}")
    return notes

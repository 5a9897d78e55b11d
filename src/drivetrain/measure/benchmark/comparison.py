"""The comparison of several variants: the interleaved benchmark, what the rounds of each variant say, and their table.

For the run as it is, the start-up counts, and then as many updates as the run has. A start is what a process takes beyond its
updates at their steady pace: building, compiling, starting readers and ranks, the first batch. Each round starts a process of
each variant. The first one may find nothing in the caches that it fills, above all that of compiled kernels. The next run on this
machine finds what the later rounds found, so these count, and the first is told beside.

A comparison whose interval is to be trusted never stops because one variant is ahead: it stops on the interval's width alone.
A search may drop variants that are behind, by the time of the whole run where its length is known, because that makes no other
variant a winner: those that stay are judged by all rounds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from drivetrain.core import accelerators
from drivetrain.core.errors import UserError
from drivetrain.core.horizon import run_horizon
from drivetrain.core.option import Count, Positive
from drivetrain.core.signals import ended_by_signals
from drivetrain.core.typed import JsonObject
from drivetrain.launch import trials
from drivetrain.launch.job import Job
from drivetrain.loader.auto import Cost
from drivetrain.measure.benchmark import quality
from drivetrain.measure.benchmark.interleave import StagedVariant, StoppingRule, Variant, run_rounds
from drivetrain.measure.benchmark.training import TimesToTarget, Trained
from drivetrain.measure.benchmark.variants import VariantSpec, baseline_job
from drivetrain.measure.intervals import Interval, ratio
from drivetrain.run import directory, environment
from drivetrain.ui.progress import Steps
from drivetrain.ui.sheet import figure

WIDTH = 0.02  # of a ratio to each side: precise enough
MIN_ROUNDS = 8  # with fewer rounds an interval may be narrow by chance
NEAR_BEST = 0.97  # of the best variant's rate: a variant that is nearer may yet be the best


@dataclass
class Row:
    """One variant's results; a figure is null where the variant failed before it was measured."""

    label: str
    overrides: list[str]
    error: str | None = None
    ratio: Interval | None = None  # samples a second relative to the first variant
    samples_per_second: float | None = None
    step_ms_p50: float | None = None
    step_ms_p95: float | None = None
    data_wait: float | None = None  # share of the time
    peak_memory_bytes: int | None = None
    peaks_bytes: list[int] = field(default_factory=list)  # of each round
    compile_s: float | None = None  # of the first round
    starts_s: list[float] = field(default_factory=list)  # of each round: building, compiling, the first batch, …
    start_s: float | None = None  # with filled caches
    first_start_s: float | None = None  # of the first round, where kernels were compiled that later rounds found in the cache
    pays_after: int | None = None  # updates until the later start has been made up for
    first_pays_after: int | None = None  # the same where nothing is compiled yet
    run_updates: int | None = None  # of the whole run, or to its target; null where that is not known
    runs_s: list[float] = field(default_factory=list)  # seconds of the whole run, its start included, by each round
    run_s: float | None = None
    whole_run: Interval | None = None  # how many times as fast as the first variant it is for the whole run
    global_batch: int | None = None
    samples: int | None = None  # in the training set
    device: str | None = None
    device_type: str | None = None
    rates: list[float] = field(default_factory=list)  # samples a second of each round
    stopped_after: int | None = None  # rounds, where the stopping rule ended the variant
    out_of_time: bool = False  # whether it ended the variant because the time was over, and not because it was behind
    verdict: quality.Verdict | None = None

    @classmethod
    def of(cls, spec: VariantSpec, variant: Variant | None, base: Variant) -> Row:
        """The results of a variant; `base` is the first variant, and `variant` is None where it could not run."""
        if variant is None:
            return cls(spec.label, spec.overrides, error="; ".join(spec.problems))
        facts: JsonObject = {
            name: variant.facts.get(name) for name in ("compile_s", "global_batch", "samples", "device", "device_type")
        }
        row = cls(spec.label, spec.overrides, variant.error, stopped_after=variant.stopped_after, **facts)
        if variant.error is not None or not variant.blocks:
            return row
        row.rates = [block.rate for block in variant.blocks]
        steps = sorted(1e3 * seconds for block in variant.blocks for seconds in block.step_s)
        row.samples_per_second = statistics.median(row.rates)
        row.step_ms_p50, row.step_ms_p95 = statistics.median(steps), steps[min(len(steps) - 1, int(0.95 * len(steps)))]
        row.data_wait = sum(b.data_wait_s for b in variant.blocks) / sum(b.seconds for b in variant.blocks)
        row.peaks_bytes = [block.peak_memory for block in variant.blocks]
        row.peak_memory_bytes = row.peaks_bytes[-1]
        if variant is base:
            row.ratio = Interval(1.0, 1.0, 1.0)
        elif base.error is None:
            base_rates = [block.rate for block in base.blocks]
            row.ratio = ratio(row.rates, base_rates[: len(row.rates)])
        row.starts_s = list(variant.starts)
        if row.starts_s:
            row.start_s = statistics.median(usual_starts(row.starts_s))
            if variant.facts.get("compiled_anew") and len(row.starts_s) > 1:
                row.first_start_s = row.starts_s[0]
        return row

    def weigh(self, variant: Variant, base: Row, updates: int | None) -> None:
        """Set what the variant is worth for a run of so many updates, start-up included; `base` is the first row."""
        self.run_updates = updates
        if not self.rates or not self.starts_s:
            return
        if updates is not None:
            self.runs_s = seconds(variant, updates)
            self.run_s = statistics.median(self.runs_s)
            self.whole_run = self.faster_for_the_run(base) if base.runs_s else None
        if self.global_batch and self.samples_per_second and base.samples_per_second and base.start_s is not None:
            step, base_step = self.global_batch / self.samples_per_second, self.global_batch / base.samples_per_second
            later_s = later_start(self.starts_s, base.starts_s)
            self.pays_after = Cost(later_s, step).pays_after(Cost(0.0, base_step)) or None
            if self.first_start_s is not None:
                self.first_pays_after = Cost(self.first_start_s, step).pays_after(Cost(base.start_s, base_step)) or None

    def faster_for_the_run(self, base: Row, confidence: float = 0.95) -> Interval:
        """The speed of the whole run relative to `base`; that of its updates alone where the length is not known."""
        mine, theirs = (base.runs_s, self.runs_s) if self.runs_s and base.runs_s else (self.rates, base.rates)
        both = min(len(mine), len(theirs))  # a variant that stopped is compared with its own rounds
        return ratio(mine[:both], theirs[:both], confidence)

    def times_to(self, target: str) -> TimesToTarget:
        """The times when the variant's seeds reached a target."""
        return TimesToTarget.of(self.label, self.verdict.runs if self.verdict is not None else (), target)

    @property
    def gain(self) -> Interval | None:
        """The ratio that decides whether it is worth it: of the whole run where its length is known, else of the updates."""
        return self.whole_run if self.whole_run is not None else self.ratio

    @property
    def pays_too_late(self) -> str:
        """The reason why the run is no shorter although the variant's updates are certainly faster; "" where there is none."""
        if self.ratio is None or self.ratio.low <= 1 or self.pays_after is None or self.run_updates is None:
            return ""
        if self.pays_after < self.run_updates:
            return ""
        return f"{self.label}: it pays after {self.pays_after:,} updates, and this run has {self.run_updates:,}"

    def figures(self) -> dict[str, str]:
        """The variant's own figures as text, by their names."""
        return {
            "samples/s": figure(self.samples_per_second, "{:,.0f}"),
            "update, median": figure(self.step_ms_p50, "{:.2f} ms"),
            "95th percentile": figure(self.step_ms_p95, "{:.2f} ms"),
            "waiting for data": figure(100 * self.data_wait if self.data_wait is not None else None, "{:.0f} %"),
            "memory": figure(self.peak_memory_bytes / 2**30 if self.peak_memory_bytes else None, "{:.2f} GiB"),
            "starts in": _with_first(self.start_s, self.first_start_s, "{:.1f}", " s"),
            "pays after": _with_first(self.pays_after, self.first_pays_after, "{:,}", " updates"),
            "whole run": figure(self.run_s, "{:,.1f} s"),
        }

    def interval(self) -> str:
        """The interval of the ratio, and what it tells; why there is none."""
        if self.ratio is None:
            return "–"
        if not self.ratio.low:
            why = "out of time" if self.out_of_time else "dropped"
            rounds = f"{len(self.rates)} round{'s' * (len(self.rates) != 1)}"
            return f"{why} after {rounds}" if self.stopped_after else "too few rounds"
        conclusion = "" if self.ratio.differs else "  no difference" if self.ratio.same else "  not distinguishable"
        return f"{self.ratio.low:.3f} – {self.ratio.high:.3f}{conclusion}"


def _with_first(usual: float | None, first: float | None, form: str, unit: str) -> str:
    """A figure with filled caches, and in brackets that of the first round, where kernels were compiled."""
    return figure(usual, form + unit) + (f" (uncompiled: {form.format(first)})" if first is not None else "")


def updates_of(job: Job | None, samples: int | None) -> int | None:
    """The updates of a job's whole run over so many samples; None where they are not known."""
    over = run_horizon(job.run, samples) if job is not None else None
    return over.updates if over is not None else None


def usual_starts(starts: Sequence[float]) -> list[float]:
    """The seconds of each round's start with filled caches: the first round counts as the median of the later ones."""
    first, *later = starts
    return [statistics.median(later), *later] if later else [first]


def seconds(variant: Variant, updates: int) -> list[float]:
    """The seconds that the whole run of so many updates would take by each round of a variant."""
    starts = usual_starts(variant.starts)[: len(variant.blocks)]
    return [Cost(start, b.seconds / b.updates).of(updates) for start, b in zip(starts, variant.blocks, strict=True)]


def speeds(variant: Variant, base: Variant) -> tuple[list[float], list[float]]:
    """The speeds of two variants in each round: whole runs a second, or samples a second where no length is known."""
    lengths = [updates_of(each.job, each.facts.get("samples")) if each.starts else None for each in (variant, base)]
    mine, theirs = (
        [1 / s for s in seconds(each, length)] if length is not None and None not in lengths else [b.rate for b in each.blocks]
        for each, length in zip((variant, base), lengths, strict=True)
    )
    return mine, theirs


def later_start(starts: Sequence[float], base: Sequence[float]) -> float:
    """Seconds by which a variant starts later than `base`, with filled caches; 0 where the rounds do not agree."""
    found = [mine - theirs for mine, theirs in zip(starts, base, strict=False)]
    found = found[1:] or found
    return statistics.median(found) if min(found) > 0 or max(found) < 0 else 0.0


def precise(variants: Sequence[Variant], rounds: int) -> Iterator[Variant]:
    """The variants whose ratio to the first variant is known to 2 %."""
    if rounds >= MIN_ROUNDS:
        base = [block.rate for block in variants[0].blocks]
        for variant in variants[1:]:
            found = ratio([block.rate for block in variant.blocks], base)
            if found.high < found.low * (1 + WIDTH) ** 2:
                yield variant


def no_gain(variants: Sequence[Variant], rounds: int) -> Iterator[Variant]:
    """The variants that are slower than the first one in clearly more than half of the rounds."""
    yield from (variant for variant in variants[1:] if _is_slower(variant, variants[0], 1.0))


def behind(variants: Sequence[Variant], rounds: int) -> Iterator[Variant]:
    """The variants without gain, and those that are clearly slower than the best one so far."""

    def mean_log_ratio(variant: Variant) -> float:  # as ratios are estimated from logarithms
        return statistics.fmean(math.log(mine / theirs) for mine, theirs in zip(*speeds(variant, variants[0]), strict=True))

    best = max(variants, key=mean_log_ratio)
    yield from (
        variant for variant in variants[1:] if _is_slower(variant, variants[0], 1.0) or _is_slower(variant, best, NEAR_BEST)
    )


def _is_slower(variant: Variant, other: Variant, share: float) -> bool:
    """True if the variant had less than `share` of the other's speed in more than half of the rounds: 2 of 2, 3 of 4, 4 of 6."""
    pairs = list(zip(*speeds(variant, other), strict=True))
    slower = sum(mine < share * theirs for mine, theirs in pairs)
    return slower >= len(pairs) / 2 + 1


@dataclass
class Settings(quality.Plan):
    """The settings of `drivetrain compare`."""

    rounds: Count = 20  # at most, each with fresh processes; with fewer than 6 there is no interval
    block_s: Positive = 0.4  # seconds of a timed block; two blocks for each round and variant
    quality: bool = False  # also train each variant to its end, with several seeds


@dataclass
class Comparison:
    """The results of all variants, the first of which is the baseline."""

    rows: list[Row]
    notes: list[str]
    overrides: list[str]
    settings: Settings
    environment: JsonObject
    seconds: float
    subject: str = "{}"  # what a sentence calls a variant, with its label in the place of {}
    target: str | None = None  # such as accuracy>=0.98: the variants are ranked by their time to it

    @property
    def failed(self) -> bool:
        """True if any variant has an error."""
        return any(row.error for row in self.rows)

    def raise_if_baseline_failed(self) -> None:
        """Raise UserError where the first variant has an error: the others have nothing to be compared to."""
        first = self.rows[0]
        if first.error is not None:
            name = first.label or "the run as it is"
            raise UserError(f"the first variant ({name}) is what the others are compared to, and it ended: {first.error}")

    def times(self) -> list[TimesToTarget]:
        """The times when each variant's seeds reached the target."""
        return [row.times_to(self.target or "") for row in self.rows]

    def order(self) -> list[int]:
        """The numbers of the rows: as they were given, or with a target the soonest there first."""
        if self.target is None:
            return list(range(len(self.rows)))
        times = self.times()
        return sorted(range(len(times)), key=lambda n: times[n].rank)

    def as_dict(self) -> JsonObject:
        """The content of compare.json: an interval is [estimate, low, high], and null where there were too few rounds."""
        content = asdict(self)
        for row in content["rows"]:
            for name in ("ratio", "whole_run"):
                if row[name] and not row[name].low:
                    row[name] = [row[name].middle, None, None]
        content["order"] = self.order()
        return content


def measure(
    specs: Sequence[VariantSpec],
    settings: Settings,
    overrides: Sequence[str],
    stopping_rule: StoppingRule = precise,
    trained: Trained | None = None,
) -> Comparison:
    """Run the variants in interleaved rounds, then train them to their ends if the settings ask for quality.

    `overrides` are recorded as what all variants have in common, and `trained` are runs that need no training again. Raises
    UserError if the first variant cannot be built; one that fails later is a row with its error, and ends the measurement.
    """
    accelerators.find()  # this, and the import of torch, once here, because the variants are forked
    specs = [_after_trials(spec) for spec in specs]
    first = baseline_job(specs)
    began = time.perf_counter()
    folder = directory.create(Path(first.run.values["output_dir"]), "compare", "variants")
    with Steps() as steps, ended_by_signals() as raise_if_interrupted:

        def progress(text: str, seconds_left: float | None = None) -> None:
            raise_if_interrupted()
            steps(text, seconds_left)

        try:
            variants = [variant_of(s, folder / str(n)) for n, s in enumerate(specs)]
            runnable = [variant for variant in variants if variant is not None]
            run_rounds(runnable, settings.rounds, settings.block_s, progress, stopping_rule)
        finally:
            directory.remove(folder)
        rows = [Row.of(spec, variant, runnable[0]) for spec, variant in zip(specs, variants, strict=True)]
        if settings.quality and rows[0].error is None:
            add_verdicts(rows, specs, settings, progress, trained)
    reach = quality.reach_of(settings, first.run) if settings.quality else None
    target = str(reach) if reach is not None else None
    for row, variant in zip(rows, variants, strict=True):
        if variant is not None:
            row.weigh(variant, rows[0], _updates_to(target, row) or updates_of(variant.job, row.samples))
    facts = environment.describe(list(overrides), first.config_hash, {})
    notes = [*_without_effect(runnable), *_unequal_work(runnable), *_together(rows)]
    seconds = time.perf_counter() - began
    return Comparison(rows, notes, list(overrides), settings, facts, seconds, target=target)


def _updates_to(target: str | None, row: Row) -> int | None:
    """The updates after which a variant's seeds reached the target, their median; None where one of them did not."""
    found = row.times_to(target).updates if target is not None else []
    reached = [updates for updates in found if updates is not None]
    return round(statistics.median(reached)) if reached and len(reached) == len(found) else None


def _after_trials(spec: VariantSpec) -> VariantSpec:
    """The variant with what its options find by trials, such as a number of threads; or why they find nothing."""
    try:
        if spec.job is not None:
            trials.choose(spec.job)
    except UserError as error:
        return replace(spec, job=None, problems=error.problems)
    return spec


def variant_of(spec: VariantSpec, folder: Path) -> Variant | None:
    """The variant of a spec; None where it has no job to run."""
    if spec.job is None:
        return None
    return (StagedVariant if spec.job.run.stages else Variant)(spec.label, spec.job, folder)


def add_verdicts(
    rows: Sequence[Row],
    specs: Sequence[VariantSpec],
    plan: quality.Plan,
    progress: Callable[..., None],
    trained: Trained | None = None,
) -> None:
    """Train the variants with several seeds, and set each row's verdict on quality."""
    for row, verdict in zip(rows, quality.judge(specs, plan, progress, trained), strict=True):
        row.verdict = verdict


def _together(rows: Sequence[Row]) -> list[str]:
    """A note on what the verdicts of several variants, and of several looks at their seeds, hold for together."""
    verdicts = [row.verdict for row in rows[1:] if row.verdict is not None]
    if not verdicts:
        return []
    variants = f"all {len(verdicts)} variants (Holm) and " if len(verdicts) > 1 else ""
    return [
        f"quality: PASS and FAIL are each decided at a level of {100 * quality.ALPHA:g} % for {variants}"
        "all looks at the seeds together (alpha spending)"
    ]


def _without_effect(variants: Sequence[Variant]) -> list[str]:
    """A note for each variant whose precision does less on this machine than its name says."""
    return [f"{variant.label}: {variant.facts['notice']}" for variant in variants if variant.facts.get("notice")]


def _unequal_work(variants: Sequence[Variant]) -> list[str]:
    """A note for each amount of work that is not the same for all variants."""
    notes = []
    for fact, meaning in (("global_batch", "samples in an update"), ("samples", "samples to train on")):
        found: dict[int, list[str]] = {}
        for variant in variants:
            if fact in variant.facts:
                found.setdefault(variant.facts[fact], []).append(variant.label)
        if len(found) > 1:
            each = "; ".join(f"{number:,} ({', '.join(labels)})" for number, labels in found.items())
            notes.append(f"the variants do not do the same work. {meaning.capitalize()}: {each}")
    return notes

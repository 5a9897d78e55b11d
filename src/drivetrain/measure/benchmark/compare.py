# long: table, page and record show the same measurement
"""`drivetrain compare` and `ablate`: techniques side by side, with intervals, and whether the result is still as good.

The whole run has its start-up and its updates. A start is the time of a process beyond its updates at their steady pace:
building, compiling, starting readers and ranks, the first batch. Each round starts a process of each variant. The first round may
find empty caches, above all the cache of compiled kernels, and fills them. The next run on this machine finds what the later
rounds found, so these count, and the first start is reported next to them.

A comparison whose interval is to be trusted never stops because one variant is ahead: it stops on the interval's width alone.
A search may drop variants that are behind, by the time of the whole run where its length is known, because that makes no other
variant a winner: those that stay are judged by all rounds.
"""

from __future__ import annotations

import math
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from drivetrain.core.errors import UserError, did_you_mean, refuse
from drivetrain.core.machine import accelerators
from drivetrain.core.machine.signals import ended_by_signals
from drivetrain.core.options.horizon import run_horizon
from drivetrain.core.options.option import Count, Positive
from drivetrain.core.options.overrides import key_of
from drivetrain.core.typed import JsonObject
from drivetrain.launch import trials
from drivetrain.launch.job import Job
from drivetrain.loader.auto import Cost
from drivetrain.measure import verbs
from drivetrain.measure.benchmark import quality
from drivetrain.measure.benchmark.interleave import StagedVariant, Variant, run_rounds
from drivetrain.measure.benchmark.quality import FAIL, FIRST, PASS, Verdict, in_words
from drivetrain.measure.benchmark.variants import (
    TimesToTarget,
    Trained,
    VariantSpec,
    baseline_job,
    compose,
    proven,
    refuse_bad,
    swept,
)
from drivetrain.measure.benchmark.variants import columns as of_target
from drivetrain.measure.changes import STAGES, Change, Changes
from drivetrain.measure.intervals import Interval, ratio
from drivetrain.run import directory, environment
from drivetrain.ui import sheet
from drivetrain.ui.output import echo
from drivetrain.ui.pages import charts
from drivetrain.ui.progress import Steps

WIDTH = 0.02  # half width of a ratio's interval that is precise enough
MIN_ROUNDS = 8  # with fewer rounds an interval may be narrow by chance
NEAR_BEST = 0.97  # of the best variant's rate: a nearer variant may still be the best


@dataclass(eq=False)
class Row:
    """One variant's results; a figure is null where the variant failed before its measurement."""

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
    first_start_s: float | None = None  # of the first round, if it compiled kernels that later rounds found in the cache
    pays_after: int | None = None  # updates that make up for the later start
    first_pays_after: int | None = None  # the same with empty caches
    run_updates: int | None = None  # of the whole run, or to its target; null where unknown
    runs_s: list[float] = field(default_factory=list)  # seconds of the whole run, its start included, by each round
    run_s: float | None = None
    whole_run: Interval | None = None  # the speed of the whole run relative to the first variant
    global_batch: int | None = None
    samples: int | None = None  # in the training set
    device: str | None = None
    device_type: str | None = None
    rates: list[float] = field(default_factory=list)  # samples a second of each round
    stopped_after: int | None = None  # rounds, where the stopping rule ended the variant
    out_of_time: bool = False  # whether it ended the variant for lack of time, not because it was behind
    verdict: quality.Verdict | None = None

    @classmethod
    def of(cls, spec: VariantSpec, variant: Variant | None, first: Row | None = None, updates: int | None = None) -> Row:
        """The results of a variant so far (None: it could not run).

        `first` is the first variant's row, None for that one itself; `updates` are the whole run's, None where unknown.
        """
        if variant is None:
            return cls(spec.label, spec.overrides, error="; ".join(spec.problems))
        facts: JsonObject = {
            name: variant.facts.get(name) for name in ("compile_s", "global_batch", "samples", "device", "device_type")
        }
        row = cls(spec.label, spec.overrides, variant.error, stopped_after=variant.stopped_after, run_updates=updates, **facts)
        blocks, base = variant.blocks, first or row
        if variant.error is not None or not blocks:
            return row
        row.rates = [block.rate for block in blocks]
        steps = sorted(1e3 * seconds for block in blocks for seconds in block.step_s)
        row.samples_per_second = statistics.median(row.rates)
        row.step_ms_p50, row.step_ms_p95 = statistics.median(steps), steps[min(len(steps) - 1, int(0.95 * len(steps)))]
        row.data_wait = sum(b.data_wait_s for b in blocks) / sum(b.seconds for b in blocks)
        row.peaks_bytes = [block.peak_memory for block in blocks]
        row.peak_memory_bytes = row.peaks_bytes[-1]
        if base.rates:
            row.ratio = ratio(row.rates, base.rates[: len(row.rates)]) if first is not None else Interval(1.0, 1.0, 1.0)
        if variant.starts:
            row._weigh(variant, base)
        return row

    def _weigh(self, variant: Variant, base: Row) -> None:
        """Set the variant's figures for the whole run, its start included."""
        self.starts_s = list(variant.starts)
        first, *later = self.starts_s
        # With filled caches, the first round counts as the median of the later ones.
        usual = [statistics.median(later), *later] if later else [first]
        self.start_s = statistics.median(usual)
        if variant.facts.get("compiled_anew") and later:
            self.first_start_s = first
        if self.run_updates is not None:
            starts = zip(usual, variant.blocks, strict=False)
            self.runs_s = [Cost(start, b.seconds / b.updates).of(self.run_updates) for start, b in starts]
            self.run_s = statistics.median(self.runs_s)
            self.whole_run = self.faster_for_the_run(base) if base.runs_s else None
        if self.global_batch and self.samples_per_second and base.samples_per_second and base.start_s is not None:
            step, base_step = self.global_batch / self.samples_per_second, self.global_batch / base.samples_per_second
            later_s = later_start(self.starts_s, base.starts_s)
            self.pays_after = Cost(later_s, step).pays_after(Cost(0.0, base_step)) or None
            if self.first_start_s is not None:
                self.first_pays_after = Cost(self.first_start_s, step).pays_after(Cost(base.start_s, base_step)) or None

    def speeds(self, base: Row) -> tuple[list[float], list[float]]:
        """The speeds of both in each round: of the whole run, or of the updates alone where a length is unknown."""
        mine, theirs = (base.runs_s, self.runs_s) if self.runs_s and base.runs_s else (self.rates, base.rates)
        both = min(len(mine), len(theirs))  # a variant that stopped is compared with its own rounds
        return mine[:both], theirs[:both]

    def faster_for_the_run(self, base: Row, confidence: float = 0.95) -> Interval:
        """The speed relative to `base`."""
        return ratio(*self.speeds(base), confidence)

    def is_slower(self, base: Row, share: float = 1.0) -> bool:
        """True if it had less than `share` of the speed of `base` in more than half of the rounds: 2 of 2, 3 of 4, 4 of 6."""
        pairs = list(zip(*self.speeds(base), strict=True))
        return sum(mine < share * theirs for mine, theirs in pairs) >= len(pairs) / 2 + 1

    @property
    def gain(self) -> Interval | None:
        """The deciding ratio: of the whole run if its length is known, else of the updates."""
        return self.whole_run if self.whole_run is not None else self.ratio

    @property
    def pays_too_late(self) -> str:
        """The reason why the run is no shorter although the variant's updates are certainly faster, or ""."""
        pays, whole = self.pays_after, self.run_updates
        if self.ratio is None or self.ratio.low <= 1 or pays is None or whole is None or pays < whole:
            return ""
        return f"{self.label}: it pays after {pays:,} updates, and this run has {whole:,}"

    def figures(self) -> dict[str, str]:
        """The variant's own figures as text, by their names."""
        return {
            "samples/s": sheet.figure(self.samples_per_second, "{:,.0f}"),
            "update, median": sheet.figure(self.step_ms_p50, "{:.2f} ms"),
            "95th percentile": sheet.figure(self.step_ms_p95, "{:.2f} ms"),
            "waiting for data": sheet.figure(100 * self.data_wait if self.data_wait is not None else None, "{:.0f} %"),
            "memory": sheet.figure(self.peak_memory_bytes / 2**30 if self.peak_memory_bytes else None, "{:.2f} GiB"),
            "starts in": _with_first(self.start_s, self.first_start_s, "{:.1f}", " s"),
            "pays after": _with_first(self.pays_after, self.first_pays_after, "{:,}", " updates"),
            "whole run": sheet.figure(self.run_s, "{:,.1f} s"),
        }

    def interval(self) -> str:
        """The interval of the ratio and its meaning, or the reason why there is none."""
        if self.ratio is None:
            return "–"
        if not self.ratio.low:
            why = "out of time" if self.out_of_time else "dropped"
            rounds = f"{len(self.rates)} round{'s' * (len(self.rates) != 1)}"
            return f"{why} after {rounds}" if self.stopped_after else "too few rounds"
        conclusion = "" if self.ratio.differs else "  no difference" if self.ratio.same else "  not distinguishable"
        return f"{self.ratio.low:.3f} – {self.ratio.high:.3f}{conclusion}"


def _with_first(usual: float | None, first: float | None, form: str, unit: str) -> str:
    """A figure with filled caches, and in brackets the first round's if it compiled kernels."""
    return sheet.figure(usual, form + unit) + (f" (uncompiled: {form.format(first)})" if first is not None else "")


def later_start(starts: Sequence[float], base: Sequence[float]) -> float:
    """Seconds by which a variant starts later than `base`, with filled caches; 0 if the rounds disagree."""
    found = [mine - theirs for mine, theirs in zip(starts, base, strict=False)]
    found = found[1:] or found
    return statistics.median(found) if min(found) > 0 or max(found) < 0 else 0.0


# Called after each round with the rows of the variants that ran it; returns those that run no further rounds.
StoppingRule = Callable[[Sequence[Row]], Iterable[Row]]


def precise(rows: Sequence[Row]) -> list[Row]:
    """The variants whose ratio to the first variant is known to 2 %."""
    known = [row for row in rows[1:] if row.ratio is not None and row.ratio.high < row.ratio.low * (1 + WIDTH) ** 2]
    return [row for row in known if len(row.rates) >= MIN_ROUNDS]


def no_gain(rows: Sequence[Row]) -> list[Row]:
    """The variants that are slower than the first one in clearly more than half of the rounds."""
    return [row for row in rows[1:] if row.is_slower(rows[0])]


def behind(rows: Sequence[Row]) -> list[Row]:
    """The variants without gain, and those that are clearly slower than the best one so far."""
    pairs = {row: zip(*row.speeds(rows[0]), strict=True) for row in rows}
    best = max(rows, key=lambda row: statistics.geometric_mean([mine / theirs for mine, theirs in pairs[row]]))
    return [row for row in rows[1:] if row.is_slower(rows[0]) or row.is_slower(best, NEAR_BEST)]


@dataclass
class CompareSettings(quality.QualitySettings):
    """The settings of `drivetrain compare`."""

    rounds: Count = 20  # at most, each with fresh processes; with fewer than 6 there is no interval
    block_s: Positive = 0.4  # seconds of a timed block; two blocks for each round and variant
    quality: bool = False  # also train each variant to its end, with several seeds


@dataclass
class Comparison:
    """The results of all variants, the baseline first."""

    rows: list[Row]
    notes: list[str]
    overrides: list[str]
    settings: CompareSettings
    environment: JsonObject
    seconds: float
    subject: str = "{}"  # a variant's name in sentences, with its label for {}
    target: str | None = None  # such as accuracy>=0.98: the variants are ranked by their time to it

    @property
    def failed(self) -> bool:
        """True if any variant has an error."""
        return any(row.error for row in self.rows)

    def raise_if_baseline_failed(self) -> None:
        """Raise UserError if the first variant has an error: there is nothing to compare the others with."""
        first = self.rows[0]
        if first.error is not None:
            name = first.label or "the run as it is"
            raise UserError(f"the first variant ({name}) is what the others are compared to, and it ended: {first.error}")

    def times(self) -> list[TimesToTarget]:
        """The times when each variant's seeds reached the target."""
        runs = [row.verdict.runs if row.verdict is not None else () for row in self.rows]
        return [TimesToTarget.of(row.label, each, self.target or "") for row, each in zip(self.rows, runs, strict=True)]

    def order(self) -> list[int]:
        """The numbers of the rows: in the given order, or with a target the soonest first."""
        if self.target is None:
            return list(range(len(self.rows)))
        times = self.times()
        return sorted(range(len(times)), key=lambda n: times[n].rank)

    def as_dict(self) -> JsonObject:
        """The content of compare.json: an interval is [estimate, low, high], and null with too few rounds."""
        content = asdict(self)
        for row in content["rows"]:
            for name in ("ratio", "whole_run"):
                if row[name] and not row[name].low:
                    row[name] = [row[name].middle, None, None]
        content["order"] = self.order()
        return content

    def _repr_html_(self) -> str:
        """The answer and its table, for notebooks."""
        return sheet_of(self)._repr_html_()


def measure(
    specs: Sequence[VariantSpec],
    settings: CompareSettings,
    overrides: Sequence[str],
    stopping_rule: StoppingRule = precise,
    trained: Trained | None = None,
) -> Comparison:
    """Run the variants in interleaved rounds, then train them to their ends if the settings ask for quality.

    `overrides` are recorded as common to all variants, and `trained` are runs that need not be repeated. Raises
    UserError if the first variant cannot be built; if it fails later, its row has the error, and the measurement ends.
    """
    accelerators.find()  # once here, with the import of torch, because the variants are forked
    specs = [_after_trials(spec) for spec in specs]
    first = baseline_job(specs)
    began = time.perf_counter()
    verdicts: list[Verdict | None] = [None] * len(specs)

    def rows_of(target: str | None = None) -> list[Row]:
        rows: list[Row] = []
        for spec, variant, verdict in zip(specs, variants, verdicts, strict=True):
            rows.append(Row.of(spec, variant, rows[0] if rows else None, _updates(variant, verdict, target)))
            rows[-1].verdict = verdict
        return rows

    def stopped(live: Sequence[Variant]) -> list[Variant]:
        rows = dict(zip(variants, rows_of(), strict=True))
        ended = stopping_rule([rows[variant] for variant in live])
        return [variant for variant in live if rows[variant] in ended]

    with Steps() as steps, ended_by_signals() as raise_if_interrupted:

        def progress(text: str, seconds_left: float | None = None) -> None:
            raise_if_interrupted()
            steps(text, seconds_left)

        with directory.working(Path(first.run.values["output_dir"]) / "compare") as folder:
            variants = [
                None if job is None else (StagedVariant if job.run.stages else Variant)(spec.label, job, folder / str(n))
                for n, spec in enumerate(specs) for job in [spec.job]
            ]  # fmt: skip
            runnable = [variant for variant in variants if variant is not None]
            run_rounds(runnable, settings.rounds, settings.block_s, progress, stopped)
        if settings.quality and runnable[0].error is None:
            verdicts = quality.judge(specs, settings, progress, trained)
    reach = quality.reach_of(settings, first.run) if settings.quality else None
    target = str(reach) if reach is not None else None
    return Comparison(
        rows_of(target),
        list(notes_on(runnable, verdicts)),
        list(overrides),
        settings,
        environment.describe(list(overrides), first.config_hash, {}),
        seconds=time.perf_counter() - began,
        target=target,
    )


def _after_trials(spec: VariantSpec) -> VariantSpec:
    """The variant with the settings found by its options' trials, such as a number of threads, or with the reason for none."""
    try:
        if spec.job is not None:
            trials.choose(spec.job)
    except UserError as error:
        return replace(spec, job=None, problems=error.problems)
    return spec


def _updates(variant: Variant | None, verdict: Verdict | None, target: str | None) -> int | None:
    """The updates of a variant's whole run, to the target if all seeds reached it; None where unknown."""
    if variant is None:
        return None
    found = TimesToTarget.of("", verdict.runs, target).updates if verdict is not None and target is not None else []
    reached = [updates for updates in found if updates is not None]
    if reached and len(reached) == len(found):
        return round(statistics.median(reached))
    over = run_horizon(variant.job.run, variant.facts.get("samples"))
    return over.updates if over is not None else None


UNEVEN = 1.3  # ratio of an update's mean to its median beyond which rate and median differ


def notes_on(variants: Sequence[Variant], verdicts: Sequence[Verdict | None] = ()) -> Iterator[str]:
    """The variants' missing effects, differences in work, and limits of verdicts."""
    yield from (f"{variant.label}: {variant.facts['notice']}" for variant in variants if variant.facts.get("notice"))
    for variant in variants:
        if (steps := [step for block in variant.blocks for step in block.step_s]) and (median := statistics.median(steps)) > 0:
            times = sum(block.seconds for block in variant.blocks) / sum(block.updates for block in variant.blocks) / median
            if not 1 / UNEVEN < times < UNEVEN:
                yield f"{variant.label}: an update takes {times:.1f} times its median on average: some are slow, or wait"
    for variant in variants[1:]:
        if (digest := variant.facts.get("weights")) is not None and digest == variants[0].facts.get("weights"):
            yield f"{variant.label}: bit for bit the first variant after {digest[0]} updates: only its speed can differ"
    for fact, meaning in (("global_batch", "samples in an update"), ("samples", "samples to train on")):
        found: dict[int, list[str]] = {}
        for variant in variants:
            if fact in variant.facts:
                found.setdefault(variant.facts[fact], []).append(variant.label)
        if len(found) > 1:
            each = "; ".join(f"{number:,} ({', '.join(labels)})" for number, labels in found.items())
            yield f"the variants do not do the same work. {meaning.capitalize()}: {each}"
    if judged := sum(verdict is not None for verdict in verdicts[1:]):
        yield (
            f"quality: PASS and FAIL are each decided at a level of {100 * quality.ALPHA:g} % for "
            f"{f'all {judged} variants (Holm) and ' if judged > 1 else ''}all looks at the seeds together (alpha spending)"
        )


BAR_WIDTH, MARGIN = 160, 12  # of the drawing of an interval, in pixels
TICK_WIDTH = 34  # of a number on the scale, in pixels
IN_ALL_FIGURES = ("updates to it", "95th percentile", "seeds")
LEAST = ("waiting for data", "update, median", "memory", "samples/s", "starts in")  # columns that a narrow terminal leaves out
METHOD = (quality.__doc__ or "").split("\n\n")
AS_IT = ("as it is", "as it was")  # labels of the run to speed up
TICKS = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)


def names(comparison: Comparison) -> list[str]:
    """A name for each variant: the first one's settings that not all share, and the others' differences from the first."""
    labels = [row.label or "the first variant" for row in comparison.rows]
    words = [label.split() for label in labels]
    common = set(words[0]).intersection(*words[1:])
    left_out = [common, *[set(words[0])] * (len(words) - 1)]
    short = [
        " ".join(word for word in each if word not in out) or label
        for each, out, label in zip(words, left_out, labels, strict=True)
    ]
    return short if len(set(short)) == len(short) else labels


def fastest(comparison: Comparison) -> int | None:
    """The number of the fastest variant that is certainly faster than the first, with a result known to be as good.

    The speed is that of the whole run, start-up included, if its length is known.
    """
    judged = comparison.settings.quality
    good = {
        n: row.gain.middle
        for n, row in enumerate(comparison.rows[1:], 1)
        if row.gain is not None and row.gain.low is not None and row.gain.low > 1
        and (not judged or (row.verdict is not None and row.verdict.outcome == PASS))
    }  # fmt: skip
    return max(good, key=lambda n: good[n]) if good else None


def headline(comparison: Comparison) -> str:
    """The answer: the variant that reaches the target soonest, if any, and the fastest one. The table has the rest."""
    first, *others = names(comparison)
    subjects = [comparison.subject.format(name.removeprefix("+ ").removeprefix("− ")) for name in others]
    said = [f"the run {first}" if first in AS_IT else first, *subjects]  # each variant's name in a sentence
    on_target = [] if comparison.target is None else [_on_target(comparison, said)]
    return " ".join([*on_target, _on_speed(comparison, said)])


def _on_target(comparison: Comparison, said: Sequence[str]) -> str:
    """The variant that reaches the target soonest, in one sentence."""
    times, target, first = comparison.times(), comparison.target, comparison.order()[0]
    soonest = times[first]
    if not soonest.reached:
        return f"No variant reaches {target}."
    median = f"{soonest.when} (median), by " if math.isfinite(soonest.median) else ""
    seeds = f"{median}{soonest.reached} of {len(soonest.seconds)} seeds"
    if (best := proven(times)) is not None and (faster := times[best].faster_than(times[0])) is not None:
        return f"{said[best]} reaches {target} sooner than {said[0]}, {faster.as_fast()}: {seeds}."
    return f"No variant reaches {target} certainly sooner than {said[0]}; the first in the order is {said[first]}: {seeds}."


def _on_speed(comparison: Comparison, said: Sequence[str]) -> str:
    """The fastest variant with a result known to be as good, and the variants with better results, in one sentence."""
    improvements = {n: by for n, row in enumerate(comparison.rows) if n and (by := _improvement(row))}
    better = max(improvements, key=lambda n: improvements[n], default=None)
    best, judged = fastest(comparison), comparison.settings.quality
    if best is None:
        none = f"measurably faster{'' if better is not None else f' than {said[0]}'}"
        uncertain = f"{none}{' with a result known to be as good' if judged else ''}."
        if better is None:
            return f"No variant is {uncertain}"
        return f"{said[better]} has {_better(comparison.rows[better], said[0])}, but no variant is {uncertain}"
    row, no_worse = comparison.rows[best], ", and its result is no worse" if judged else ""
    speed = f"{said[best]} is {_speed(row, said[0])}"
    if better is None:
        return f"{speed}{no_worse}."
    if best in improvements:
        return f"{speed}, and has {_better(row, said[0])}."
    return f"{speed}{no_worse}; {said[better]} has {_better(comparison.rows[better], said[0])}."


def _speed(row: Row, base: str) -> str:
    """The speed of a variant in words: by its updates; if these are not faster, for the whole run because it starts sooner."""
    ratio = row.ratio
    if row.whole_run is not None and (ratio is None or ratio.low <= 1):
        ratio, base = row.whole_run, f"{base} for the whole run, as it starts sooner"
    assert ratio is not None
    return ratio.as_fast(base)


def _improvement(row: Row) -> float:
    """The certain gain of a variant's metric over the first variant's; else 0."""
    found = row.verdict and row.verdict.degradation.get(row.verdict.metric)
    certain = found and found.high is not None and found.high < 0 and row.verdict and row.verdict.outcome != FAIL
    return -found.middle if found and certain else 0.0


def _better(row: Row, base: str) -> str:
    """The figure in which a variant is better than the first one, and the difference, in words."""
    assert row.verdict is not None
    return f"a better {row.verdict.metric} than {base}, by {_difference(row.verdict).removeprefix('better by ')}"


def table(comparison: Comparison) -> sheet.Table:
    """Each variant with all its measurements: the time to the target, the result, speed and interval, the rest."""
    rows, verdicts = comparison.rows, [row.verdict for row in comparison.rows]
    ratios = [value for row in rows if row.ratio is not None for value in row.ratio if value and math.isfinite(value)]
    # Logarithmic, so that twice as fast lies as far from 1 as half as fast.
    axis = charts.Axis(min([0.9, *ratios]) / 1.03, max([1.1, *ratios]) * 1.03, MARGIN, BAR_WIDTH - MARGIN, log=True)
    columns: dict[str, Sequence[sheet.Cell]] = {"variant": names(comparison)}
    if comparison.target is not None:
        times = comparison.times()
        columns |= of_target(times, times[0], comparison.target)
    if comparison.settings.quality:
        metric = next((verdict.metric for verdict in verdicts if verdict is not None), "the metric")
        columns[f"{metric} of the validation set"] = [_difference(v) if v is not None else "–" for v in verdicts]
    columns["speed"] = [sheet.figure(row.ratio and row.ratio.middle, "{:.2f} ×") for row in rows]
    columns["95 % interval"] = [sheet.Drawn(row.interval() if n else "–", _bar(axis, row, not n)) for n, row in enumerate(rows)]
    if comparison.settings.quality:
        columns["no worse?"] = ["–" if v is None else "" if v.outcome == FIRST else v.outcome for v in verdicts]
        columns["seeds"] = ["–" if v is None else str(len(v.runs)) for v in verdicts]
    prose = [name for name in columns if name.endswith("validation set")]
    figures = [row.figures() for row in rows]
    columns |= {name: [each[name] for each in figures] for name in figures[0]}
    found = sheet.Table.of(
        columns, name="The variants", prose=prose, sortable=True, below={"95 % interval": _numbers(axis)}, spare=LEAST
    )
    order, best = comparison.order(), fastest(comparison) if comparison.target is None else proven(comparison.times())
    ordered = replace(found, rows=[found.rows[n] for n in order], winner=None if best is None else order.index(best))
    return ordered.used(1 + list(columns).index("95 % interval"))


def sections(comparison: Comparison) -> list[sheet.Section]:
    """The sections of a comparison: the variants with their differences, the reason for each verdict, the method, the rounds."""
    called, rows, found = names(comparison), comparison.rows, table(comparison)
    shown, same = found.only([n for n, name in enumerate(found.header) if name not in IN_ALL_FIGURES]).differing(
        1 + [*found.header].index("95 % interval")
    )
    rounds = max((len(row.rates) for row in rows), default=0)
    how = (
        f"Relative to {called[0]}: {rounds} rounds, each with fresh processes that run two timed blocks of about "
        f"{comparison.settings.block_s:g} s; one process runs at a time. The point is the Hodges–Lehmann estimate over the "
        "rounds, the bar its 95 % interval (Wilcoxon), on a logarithmic axis around 1. Where the bar includes 1, the rounds do "
        "not distinguish the two."
    )
    of_variants = [
        charts.ChartLine(name, [(float(n), rate) for n, rate in enumerate(row.rates, 1)])
        for name, row in zip(called, rows, strict=True)
    ]
    drawn = charts.curves("Samples a second, round by round", of_variants, "round", zero=True)
    return [
        shown,
        *([sheet.words(f"the same for all: {', '.join(f'{name} {cell}' for name, cell in same)}")] if same else []),
        sheet.words(*(f"{name} failed: {row.error}" for name, row in zip(called, rows, strict=True) if row.error)),
        sheet.words(*(_because(name, row.verdict) for name, row in zip(called, rows, strict=True) if row.verdict is not None)),
        sheet.words(*comparison.notes),
        sheet.remarks(how),
        sheet.folded("All figures", [found]),
        sheet.PagePart(charts.grid([drawn])),
        sheet.remarks("A change that all variants share is the machine's; a change of one alone is its own."),
        *(
            [sheet.folded("How it is decided whether the result is no worse", [sheet.words(*METHOD)])]
            if comparison.settings.quality
            else []
        ),
    ]


def titled(comparisons: Mapping[str, Comparison], said: str = "") -> list[sheet.Section]:
    """The comparisons under their titles, each with its answer, unless `said` has it."""
    found: list[sheet.Section] = []
    for title, comparison in comparisons.items():
        answer = headline(comparison)
        found += sheet.under(title, *([sheet.words(answer)] if answer != said else []), *sections(comparison))
    return found


def _because(name: str, verdict: Verdict) -> str:
    """A variant's verdict in a line."""
    if verdict.outcome == FIRST:
        return f"{name}: {verdict.reason}"
    claim = "changes training" if verdict.effect == "changes" else f"claims to be {verdict.effect}"
    return f"{name}, which {claim}: {verdict.outcome}: {verdict.reason}"


def _difference(verdict: Verdict) -> str:
    """Return the metric's difference from the first variant's, or that one's own value, or the reason why there is neither."""
    found = verdict.degradation.get(verdict.metric or "")
    if found is None:
        return verdict.reason.split("; ")[0].split(", ")[0].removeprefix(f"{verdict.metric} ")
    return in_words(*found)


def _numbers(axis: charts.Axis) -> str:
    """The drawing of an axis of ratios."""
    ticks: list[float] = []
    for tick in sorted((t for t in TICKS if axis.low <= t <= axis.high), key=lambda t: t != 1):  # 1 takes precedence
        if all(abs(axis.at(tick) - axis.at(other)) >= TICK_WIDTH for other in ticks):
            ticks.append(tick)
    texts = "".join(f'<text x="{axis.at(t):.1f}" y="11" text-anchor="middle">{t:g} ×</text>' for t in ticks)
    return f'<svg class="ratio" viewBox="0 0 {BAR_WIDTH} 14" role="img" aria-label="logarithmic axis">{texts}</svg>'


def _bar(axis: charts.Axis, row: Row, first: bool) -> str:
    """The drawing of a variant's ratio and its interval, with the line of 1."""
    line = f'<line class="one" x1="{axis.at(1):.1f}" x2="{axis.at(1):.1f}" y1="0" y2="18"/>'
    if row.ratio is None:
        return f'<svg class="ratio" viewBox="0 0 {BAR_WIDTH} 18" role="img" aria-label="not measured">{line}</svg>'
    low, middle, high = row.ratio.low, row.ratio.middle, row.ratio.high  # without an interval 0 or None, and infinite
    kind = "same" if first or not low or low <= 1 <= high else "faster" if low > 1 else "slower"
    drawn = f'<line x1="{axis.at(low):.1f}" x2="{axis.at(high):.1f}" y1="9" y2="9"/>' if low and not first else ""
    said = f"{middle:.2f}" + (f", 95 % interval {low:.3f} to {high:.3f}" if low and not first else "")
    return (
        f'<svg class="ratio" viewBox="0 0 {BAR_WIDTH} 18" role="img" aria-label="{said}"><title>{said}</title>{line}'
        f'<g class="{kind}">{drawn}<circle cx="{axis.at(middle):.1f}" cy="9" r="4.5"/></g></svg>'
    )


def run(argv: Sequence[str], config_dirs: Sequence[str] = (), recipe: Path | None = None) -> tuple[Comparison, list[VariantSpec]]:
    """Compare the variants; show, save and return the results, and write them as `recipe`.

    Raises UserError if there is nothing to compare.
    """
    settings, overrides = verbs.split(argv, CompareSettings, "compare", recipe)
    specs, notes = swept(overrides, config_dirs)
    if len(specs) < 2:
        raise UserError("there is nothing to compare: give one key several values, as in precision=fp32,bf16")
    refuse_bad(specs)
    quality.check(settings, baseline_job(specs), settings.quality)
    for note in notes:
        echo(note)
    comparison = measure(specs, settings, overrides)
    comparison.raise_if_baseline_failed()
    comparison.notes = notes + comparison.notes
    leave(comparison, baseline_job(specs), argv)
    return comparison, specs


def sheet_of(comparison: Comparison, verb: str = "compare") -> sheet.Sheet:
    """The sheet of a comparison."""
    return sheet.Sheet(f"Techniques compared – drivetrain {verb}", headline(comparison), sections(comparison))


def leave(comparison: Comparison, job: Job, argv: Sequence[str], verb: str = "compare") -> None:
    """Show a comparison, and write compare.json and compare.html to a new folder under the run's output_dir."""
    verbs.leave(job, "compare", sheet_of(comparison, verb), [*verb.split(), *argv], comparison.as_dict())


# --- `drivetrain ablate`: what each technique of a recipe gains alone, what its removal costs, and the steps to the recipe ---


@dataclass
class AblationSettings(CompareSettings):
    """The settings of `drivetrain ablate`."""

    rounds: Count = 8  # of each of three comparisons, which have many variants
    recipe: str = "fast"
    baseline: str = "naive"
    tables: list[Literal["alone", "without", "steps"]] = field(default_factory=lambda: ["alone", "without", "steps"])
    only: list[str] | None = None  # the techniques to measure, by their settings or groups; null: all that differ
    format: Literal["markdown", "latex"] | None = None  # print each table for a paper, too


def techniques(baseline: Job, recipe: Job) -> Changes:
    """The changes that turn the baseline into the recipe: options, keys, epochs, items of lists and stages; no machine keys."""
    values = {*recipe.composed.plain} - {*recipe.composed.choices, STAGES, "epochs"}
    return Changes(baseline, recipe, {"logger", "saving", *values, *baseline.machine_local_keys, *recipe.machine_local_keys})


def ablate(
    argv: Sequence[str], config_dirs: Sequence[str] = (), file: Path | None = None
) -> tuple[dict[str, Comparison], list[VariantSpec]]:
    """Measure the tables, show and save them; return them, the steps first, and the variants of the last one measured.

    `file` is the recipe to write of the last step.
    """
    settings, overrides = verbs.split(argv, AblationSettings, "ablate", file)
    if file is not None and "steps" not in settings.tables:
        raise UserError("--recipe hands on the last of the steps, the whole recipe: tables= must have steps")
    if not settings.tables:
        raise UserError("tables=[] measures nothing: leave it out, or name some of alone, without and steps")
    recipe, baseline = settings.recipe, settings.baseline
    both = [compose(n, [f"recipe={n}", *overrides], config_dirs, own_saving=True) for n in (baseline, recipe)]
    refuse_bad(both)
    before, after = (baseline_job([spec]) for spec in both)
    quality.check(settings, before, settings.quality)
    if overrides and not any(key_of(word) == "recipe" for word in argv):
        echo(f"no recipe= is given: what is measured are the techniques of recipe={recipe}; {_on_both_sides(overrides)}")
    added, removed = techniques(before, after), techniques(after, before)
    found, removals = _named(added.found(), settings.only), {change.key: change for change in removed.found()}
    if not found:
        raise UserError(f"recipe={recipe} and baseline={baseline} do not differ with these overrides")
    beside = f" with {len(overrides)} override{'s' * (len(overrides) != 1)}" if overrides else ""  # of both sides
    trained: Trained = {}  # the runs of all three comparisons, which share variants
    comparisons: dict[str, Comparison] = {}

    def measured(title: str, said: str, name: str, chosen: dict[str, list[Change]], subject: str) -> list[VariantSpec]:
        """Measure the baseline with each variant's techniques, or the recipe without; `subject` is its name in a sentence."""
        echo(f"\n{said}")
        given = [f"recipe={name}", *overrides]
        specs = [compose(f"{name}{beside}", given, config_dirs)]
        for label, changes in chosen.items():
            words = removed.overrides([removals[c.key] for c in changes]) if name == recipe else added.overrides(changes)
            specs.append(compose(label, [*given, *words], config_dirs))
        done = comparisons[title] = measure(specs, settings, overrides, trained=trained)
        done.raise_if_baseline_failed()
        done.subject = subject
        sheet_of(done).show()
        if settings.format is not None:
            echo(f"\n{table(done).used().written(settings.format)}")
        return specs

    if "alone" in settings.tables:
        alone, title = {f"+ {t.label}": [t] for t in found}, f"{baseline} and one technique more"
        specs = measured(title, f"{baseline} + each", baseline, alone, f"{baseline} with {{}}")
        found = _by_gain(found, comparisons[title])
    if "without" in settings.tables:
        without, title = {f"− {t.label}": [t] for t in found}, f"{recipe} and one technique less"
        specs = measured(title, f"{recipe} − each", recipe, without, f"{recipe} without {{}}")
    if "steps" in settings.tables:
        steps = {f"+ {technique.label}": found[: n + 1] for n, technique in enumerate(found)}
        title = f"From {baseline} to {recipe}, step by step"
        specs = measured(title, f"from {baseline} to {recipe}", baseline, steps, f"{baseline} with all up to {{}}")
        comparisons = {title: comparisons.pop(title), **comparisons}
    echo()
    content = {title: done.as_dict() for title, done in comparisons.items()}
    shown = ablation_sheet(recipe, baseline, comparisons, overrides)
    verbs.write(verbs.folder(before, "ablate"), "ablate", shown, ["ablate", *argv], content)
    return comparisons, specs


def _named(found: list[Change], names: Sequence[str] | None) -> list[Change]:
    """The changes of these settings or groups; None: all. Raises UserError for an unknown name."""
    known = {name: change for change in found for name in (change.key.partition(".")[0], change.key, change.label)}
    refuse(
        f"only={name}: it is no technique that differs: {did_you_mean(name, known)}" for name in names or () if name not in known
    )
    return [c for c in found if names is None or {c.key.partition(".")[0], c.key, c.label} & {*names}]


def _on_both_sides(overrides: Sequence[str]) -> str:
    """The overrides of an ablation, in words."""
    return (
        f"{shlex.join(overrides)} {'are' if len(overrides) > 1 else 'is'} set on both sides, so that the effect is not measured"
    )


def ablation_sheet(recipe: str, baseline: str, comparisons: dict[str, Comparison], overrides: Sequence[str] = ()) -> sheet.Sheet:
    """The sheet of an ablation; its answer is the first comparison's."""
    about = f"What each technique of the recipe {recipe} is worth against {baseline}."
    if len(comparisons) > 1:
        about += " Where a technique gains when it is added alone, and its removal costs nothing, another makes up for it."
    if overrides:
        about += f" {_on_both_sides(overrides)}."
    answer = headline(next(iter(comparisons.values())))
    return sheet.Sheet(
        f"{recipe} against {baseline} – drivetrain ablate", answer, [sheet.remarks(about), *titled(comparisons, answer)]
    )


def _by_gain(found: list[Change], plus: Comparison) -> list[Change]:
    """The techniques in descending order of their gain alone; those that cannot run alone come last.

    With a target, the soonest come first.
    """
    if plus.target is not None:
        return [found[n - 1] for n in plus.order() if n]
    gains = {t: row.ratio.middle if row.ratio else 0.0 for t, row in zip(found, plus.rows[1:], strict=True)}
    return sorted(found, key=lambda t: -gains[t])

"""What the rounds of an arm say: how fast its updates are, what it is worth for the whole run, and whether it needs more rounds.

For the run as it is, the start-up counts, and then as many updates as the run has. A start is what a process takes beyond its
updates at their steady pace: building, compiling, starting readers and ranks, the first batch. Each round starts a process of
each arm. The first one may find nothing in the caches that it fills, above all that of compiled kernels. The next run on this
machine finds what the later rounds found, so these count, and the first is told beside.

A comparison whose interval is to be trusted never stops because one arm is ahead: it stops on the interval's width alone.
A search may drop arms that are behind, by the time of the whole run where its length is known, because that makes no other arm a
winner: those that stay are judged by all rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.core.cost import Cost
from drivetrain.core.horizon import run_horizon
from drivetrain.measure.benchmark import noninferiority
from drivetrain.measure.benchmark.arms import ArmSpec
from drivetrain.measure.benchmark.interleave import Arm
from drivetrain.measure.intervals import Interval, ratio
from drivetrain.ui.sheet import figure

WIDTH = 0.02  # of a ratio to each side: precise enough
MIN_ROUNDS = 8  # with fewer rounds an interval may be narrow by chance
NEAR_BEST = 0.97  # of the best arm's rate: an arm that is nearer may yet be the best


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
    compile_s: float | None = None  # of the first round
    starts_s: list[float] = field(default_factory=list)  # of each round: building, compiling, the first batch, …
    start_s: float | None = None  # with filled caches
    first_start_s: float | None = None  # of the first round, where kernels were compiled that later rounds found in the cache
    pays_after: int | None = None  # updates until the later start has been made up for
    first_pays_after: int | None = None  # the same where nothing is compiled yet
    run_updates: int | None = None  # of the whole run, or to its target; null where that is not known
    runs_s: list[float] = field(default_factory=list)  # seconds of the whole run, its start included, by each round
    run_s: float | None = None
    whole_run: Interval | None = None  # how many times as fast as the first arm it is for the whole run
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
        facts: dict[str, Any] = {
            name: arm.facts.get(name) for name in ("compile_s", "global_batch", "samples", "device", "device_type")
        }
        row = cls(spec.label, spec.overrides, arm.error, stopped_after=arm.stopped_after, **facts)
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
        row.starts_s = list(arm.starts)
        if row.starts_s:
            row.start_s = statistics.median(usual_starts(row.starts_s))
            if arm.facts.get("compiled_anew") and len(row.starts_s) > 1:
                row.first_start_s = row.starts_s[0]
        return row

    def weigh(self, arm: Arm, base: Row, updates: int | None) -> None:
        """Set what the arm is worth for a run of so many updates, start-up included; `base` is the first row, weighed before."""
        self.run_updates = updates
        if not self.rates or not self.starts_s:
            return
        if updates is not None:
            self.runs_s = seconds(arm, updates)
            self.run_s = statistics.median(self.runs_s)
            self.whole_run = self.faster_for_the_run(base) if base.runs_s else None
        if self.global_batch and self.samples_per_second and base.samples_per_second and base.start_s is not None:
            step, base_step = self.global_batch / self.samples_per_second, self.global_batch / base.samples_per_second
            later_s = later_start(self.starts_s, base.starts_s)
            self.pays_after = Cost(later_s, step).pays_after(Cost(0.0, base_step)) or None
            if self.first_start_s is not None:
                self.first_pays_after = Cost(self.first_start_s, step).pays_after(Cost(base.start_s, base_step)) or None

    def faster_for_the_run(self, base: Row, confidence: float = 0.95) -> Interval:
        """How many times as fast as `base` it is for the whole run; by its updates alone where the length is not known."""
        mine, theirs = (base.runs_s, self.runs_s) if self.runs_s and base.runs_s else (self.rates, base.rates)
        both = min(len(mine), len(theirs))  # an arm that stopped is compared with its own rounds
        return ratio(mine[:both], theirs[:both], confidence)

    @property
    def gain(self) -> Interval | None:
        """What decides whether it is worth it: the ratio of the whole run where its length is known, else that of the updates."""
        return self.whole_run if self.whole_run is not None else self.ratio

    @property
    def pays_too_late(self) -> str:
        """Why the arm makes the run no shorter although its updates are certainly faster; "" where nothing tells that."""
        if self.ratio is None or self.ratio.low <= 1 or self.pays_after is None or self.run_updates is None:
            return ""
        if self.pays_after < self.run_updates:
            return ""
        return f"{self.label}: it pays after {self.pays_after:,} updates, and this run has {self.run_updates:,}"

    def figures(self) -> dict[str, str]:
        """The arm's own figures as text, by their names."""
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


def updates_of(job: Any, samples: int | None) -> int | None:
    """The updates of a job's whole run over so many samples; None where they are not known."""
    over = run_horizon(job.run, samples) if job is not None else None
    return over.updates if over is not None else None


def usual_starts(starts: Sequence[float]) -> list[float]:
    """The seconds of each round's start with filled caches: the first round counts as the median of the later ones."""
    first, *later = starts
    return [statistics.median(later), *later] if later else [first]


def seconds(arm: Any, updates: int) -> list[float]:
    """What the whole run of so many updates would take by each round of an arm."""
    starts = usual_starts(arm.starts)[: len(arm.blocks)]
    return [Cost(start, b.seconds / b.updates).of(updates) for start, b in zip(starts, arm.blocks, strict=True)]


def speeds(arm: Any, base: Any) -> tuple[list[float], list[float]]:
    """How fast two arms were in each round: whole runs a second, or samples a second where no length is known."""
    lengths = [updates_of(each.job, each.facts.get("samples")) if each.starts else None for each in (arm, base)]
    mine, theirs = (
        [1 / s for s in seconds(each, length)] if length is not None and None not in lengths else [b.rate for b in each.blocks]
        for each, length in zip((arm, base), lengths, strict=True)
    )
    return mine, theirs


def later_start(starts: Sequence[float], base: Sequence[float]) -> float:
    """Seconds by which an arm starts later than `base`, with filled caches; 0 where the rounds do not agree."""
    found = [mine - theirs for mine, theirs in zip(starts, base, strict=False)]
    found = found[1:] or found
    return statistics.median(found) if min(found) > 0 or max(found) < 0 else 0.0


def precise(arms: Sequence[Arm], rounds: int) -> Iterator[Arm]:
    """The arms whose ratio to the first arm is known to 2 %."""
    if rounds >= MIN_ROUNDS:
        base = [block.rate for block in arms[0].blocks]
        for arm in arms[1:]:
            found = ratio([block.rate for block in arm.blocks], base)
            if found.high < found.low * (1 + WIDTH) ** 2:
                yield arm


def no_gain(arms: Sequence[Arm], rounds: int) -> Iterator[Arm]:
    """The arms that are slower than the first one in clearly more than half of the rounds."""
    yield from (arm for arm in arms[1:] if _is_slower(arm, arms[0], 1.0))


def behind(arms: Sequence[Arm], rounds: int) -> Iterator[Arm]:
    """The arms without gain, and those that are clearly slower than the best one so far."""
    best = max(arms, key=lambda arm: _mean_log_ratio(arm, arms[0]))
    yield from (arm for arm in arms[1:] if _is_slower(arm, arms[0], 1.0) or _is_slower(arm, best, NEAR_BEST))


def _is_slower(arm: Arm, other: Arm, share: float) -> bool:
    """Whether the arm had less than `share` of the other's speed in at least one round more than half: 2 of 2, 3 of 4, 4 of 6."""
    pairs = list(zip(*speeds(arm, other), strict=True))
    slower = sum(mine < share * theirs for mine, theirs in pairs)
    return slower >= len(pairs) / 2 + 1


def _mean_log_ratio(arm: Arm, base: Arm) -> float:
    """The mean logarithm of the arm's speed to that of `base`, as ratios are estimated from logarithms."""
    return statistics.fmean(math.log(mine / theirs) for mine, theirs in zip(*speeds(arm, base), strict=True))

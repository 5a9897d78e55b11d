"""How a subset of the changes is measured: its speed by an interleaved benchmark, or its quality by training with paired seeds.

Both go on with the pairs that a subset has, so that a question that needs a narrower interval adds to what is there.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from drivetrain.core.errors import UserError
from drivetrain.core.option import Count, Positive
from drivetrain.core.selection import selected
from drivetrain.launch.job import Job
from drivetrain.measure.benchmark import comparison, quality
from drivetrain.measure.benchmark.arms import ArmSpec
from drivetrain.measure.benchmark.interleave import Arm, StoppingRule, never_stop
from drivetrain.measure.bisect.changes import Change, Changes
from drivetrain.measure.bisect.search import Measured, Subset
from drivetrain.measure.bisect.sides import Side
from drivetrain.measure.intervals import EQUIVALENCE, Interval, deviation, mean, ratio
from drivetrain.measure.training import trainings
from drivetrain.ui.progress import Steps

LEAST_ROUNDS, LEAST_SEEDS = 6, 4  # before an interval is trusted
SPREADS = 1.0  # a difference in quality that is smaller than so many standard deviations of GOOD over its seeds does not matter
LEAST_MARGIN = 0.005  # nor does one below this share of GOOD's figure

UNKNOWN = Interval(0.0, -math.inf, math.inf)

Decided = Callable[[Interval], bool]


@dataclass
class Settings:
    """The settings of `drivetrain bisect`."""

    rounds: Count = 40  # of each comparison, at most
    block_s: Positive = 0.4
    quality: bool = False
    seeds: Count = 16  # of each comparison with quality=true, at most
    budget_s: Positive = 3600.0  # for all comparisons, approximately


class GoodFails(Exception):
    """GOOD itself does not run, so nothing can be compared to it; the message is its error."""


@dataclass
class Subsets:
    """GOOD with any subset of the changes on top."""

    good: Side
    changes: Changes
    common: list[str]  # overrides of every arm
    numbered: list[Change] = field(default_factory=list)

    def arm(self, chosen: Subset) -> ArmSpec:
        """GOOD with the changes of these numbers; without a job where the options' rules refuse it."""
        changes = [self.numbered[number] for number in sorted(chosen)]
        given = self.overrides(changes)
        label = " ".join(change.key for change in changes) or self.good.name
        try:
            return ArmSpec(label, self.good.changed(given), self.good.job(given), composes=self.good.job)
        except UserError as error:
            return ArmSpec(label, self.good.changed(given), None, error.problems)

    def job(self, chosen: Subset) -> Job:
        """The job of GOOD with these changes. Raises UserError."""
        return self.good.job(self.overrides([self.numbered[number] for number in sorted(chosen)]))

    def overrides(self, changes: Sequence[Change]) -> list[str]:
        """The overrides that make these changes, and those of every arm."""
        return [*self.changes.overrides(changes), *self.common]


@dataclass
class Speed:
    """Measures samples a second in rounds of fresh processes; an effect is the logarithm of the ratio to GOOD's."""

    subsets: Subsets
    settings: Settings
    until: float  # of time.monotonic
    rates: dict[Subset, tuple[list[float], list[float]]] = field(default_factory=dict)  # of the subset and of GOOD, by round

    margin = math.log1p(EQUIVALENCE)
    unit = "samples/s"

    def shown(self, effect: Interval) -> tuple[str, str]:
        """An effect and its interval as text: ratios to GOOD."""
        return f"{math.exp(effect.middle):.3f} ×", f"{math.exp(effect.low):.3f} – {math.exp(effect.high):.3f}"

    def measure(self, chosen: Subset, decided: Decided) -> Measured:
        """Add rounds until the interval decides the question, or the rounds or the time are used."""
        mine, base = self.rates.setdefault(chosen, ([], []))
        left = self.settings.rounds - len(mine)
        if left <= 0 or time.monotonic() > self.until or _is_enough(mine, base, decided):
            return _measured(mine, base)
        arm = self.subsets.arm(chosen)
        if arm.job is None:
            return Measured(problem=f"refused: {'; '.join(arm.problems)}")

        def stop(live: Sequence[Arm], rounds: int) -> Iterator[Arm]:
            old, *others = ([block.rate for block in each.blocks] for each in live)
            new = others[0] if others else []  # none where the arm has failed
            if time.monotonic() > self.until or _is_enough([*mine, *new], [*base, *old], decided):
                yield from live[1:]

        done = self._compare(arm, left, stop)
        mine += done.rows[1].rates
        base += done.rows[0].rates[: len(done.rows[1].rates)]
        if (error := done.rows[1].error) is not None:
            return Measured(pairs=max(1, len(mine)), problem=f"failed: {error.splitlines()[0]}")
        return _measured(mine, base)

    def failure(self, chosen: Subset) -> str | None:
        """Why a subset fails while it runs; None where it runs."""
        return self._compare(self.subsets.arm(chosen), 1, never_stop).rows[1].error

    def _compare(self, arm: ArmSpec, rounds: int, stop: StoppingRule) -> comparison.Comparison:
        good = self.subsets.arm(frozenset())
        limits = comparison.Settings(rounds=rounds, block_s=self.settings.block_s)
        done = comparison.measure([good, arm], limits, good.overrides, stop)
        if done.rows[0].error is not None:
            raise GoodFails(done.rows[0].error)
        return done


def _is_enough(mine: list[float], base: list[float], decided: Decided) -> bool:
    return len(mine) >= LEAST_ROUNDS and decided(log_ratio(mine, base))


def _measured(mine: list[float], base: list[float]) -> Measured:
    return Measured(log_ratio(mine, base) if mine else UNKNOWN, len(mine))


def log_ratio(mine: Sequence[float], base: Sequence[float]) -> Interval:
    """The logarithm of the ratio of paired rates, with its 95 % interval."""
    middle, low, high = ratio(mine, base)
    return Interval(math.log(middle), math.log(low) if low else -math.inf, math.log(high))


@dataclass
class Trained:
    """One training: the metric at its end, or why it has none."""

    metric: float | None
    error: str = ""
    diverged: bool = False


class Quality:
    """Trains GOOD and subsets with the same seeds; an effect is the mean difference of the final metric, seed by seed."""

    def __init__(self, subsets: Subsets, settings: Settings, until: float) -> None:
        self.subsets, self.settings, self.until = subsets, settings, until
        good = subsets.arm(frozenset()).job
        assert good is not None  # composed before
        self.unit, self._good = selected(good.run).name, good
        self._trained: dict[tuple[Subset, int], Trained] = {}

    @property
    def margin(self) -> float:
        """The spread of GOOD over its seeds, or a small share of its mean where that is more."""
        found = [run.metric for (chosen, _), run in self._trained.items() if not chosen and run.metric is not None]
        if len(found) < 2:
            return 0.0
        return max(SPREADS * deviation(found), LEAST_MARGIN * abs(statistics.fmean(found)))

    def shown(self, effect: Interval) -> tuple[str, str]:
        """An effect and its interval as text: differences of the metric."""
        return f"{effect.middle:+.4f}", f"{effect.low:+.4f} – {effect.high:+.4f}"

    def measure(self, chosen: Subset, decided: Decided) -> Measured:
        """Add seeds until the interval decides the question, or the seeds or the time are used."""
        arm = self.subsets.arm(chosen)
        if arm.job is None:
            return Measured(problem=f"refused: {'; '.join(arm.problems)}")
        differences: list[float] = []
        for number in range(self.settings.seeds):
            enough = len(differences) >= LEAST_SEEDS and decided(mean(differences))
            if (chosen, number) not in self._trained and (enough or time.monotonic() > self.until):
                break
            good, run = self._train(frozenset(), number), self._train(chosen, number)
            if good.metric is None:
                raise GoodFails(good.error)
            if run.metric is None:
                return Measured(pairs=number + 1, problem=run.error, diverged=run.diverged)
            differences.append(run.metric - good.metric)
        return Measured(mean(differences) if differences else UNKNOWN, len(differences))

    def failure(self, chosen: Subset) -> str | None:
        """Why a subset fails while it is trained; None where it completes."""
        return self._train(chosen, 0).error or None

    def _train(self, chosen: Subset, number: int) -> Trained:
        """Train with a seed, once."""
        if (chosen, number) not in self._trained:
            seed = self._good.run.runtime.seed + number
            with Steps() as progress, trainings("bisect", self._good, progress=progress) as train:
                run = train(self.subsets.arm(chosen), seed)
            found = quality.trained_run(run, seed)
            value = found.figures.get(self.unit)
            error = found.error or ("" if value is not None else f"failed: it evaluates no {self.unit}")
            self._trained[chosen, number] = Trained(value, error, run.status == "diverged")
        return self._trained[chosen, number]


@dataclass
class Fails:
    """Measures only whether a subset fails while it runs, for a BAD that does: 1 if it fails, else 0."""

    measurer: Speed | Quality
    errors: dict[Subset, str | None] = field(default_factory=dict)

    margin = 0.5
    unit = "runs"

    def shown(self, effect: Interval) -> tuple[str, str]:
        """Whether it runs, as text."""
        return "fails" if effect.middle else "runs", ""

    def measure(self, chosen: Subset, decided: Decided) -> Measured:
        """Run the subset for as long as it takes to fail."""
        arm = self.measurer.subsets.arm(chosen)
        if arm.job is None:
            return Measured(problem=f"refused: {'; '.join(arm.problems)}")
        if chosen not in self.errors:
            self.errors[chosen] = self.measurer.failure(chosen)
        found = float(self.errors[chosen] is not None)
        return Measured(Interval(found, found, found), 1, self.errors[chosen] or "")

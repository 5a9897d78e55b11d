"""The search for the changes that make a difference, by halving prefixes.

Subsets of the changes are added to GOOD, and each has an effect with an interval. A binary search over the first changes
follows the larger part of the effect: the first half of them, then the first quarter or three quarters, and so on, until one
change is left whose addition makes the larger step. If it makes that step alone, it is a cause. Else it needs partners: the
same search, always with this change, finds them among the earlier ones. Then BAD is measured without the cause, and what
remains is searched in the same way, so causes that add up are all named. A single cause among n changes takes at most 3 + log2
n comparisons. A subset that cannot run counts as not bad.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from drivetrain.config.catalog import LISTS
from drivetrain.core.errors import collecting, printable
from drivetrain.core.options.option import Count, Positive
from drivetrain.core.options.overrides import key_of
from drivetrain.core.options.selection import selected
from drivetrain.measure.benchmark import compare
from drivetrain.measure.benchmark.variants import Trained, VariantSpec, baseline_job, trainings
from drivetrain.measure.changes import Change, Changes, apply
from drivetrain.measure.intervals import EQUIVALENCE, Interval, deviation, mean
from drivetrain.measure.intervals import middle as middle_of
from drivetrain.ui import sheet
from drivetrain.ui.output import echo
from drivetrain.ui.progress import Steps


@dataclass
class Subsets:
    """GOOD, BAD, the changes from one to the other, and notices for the user."""

    good: VariantSpec
    bad: VariantSpec
    changes: Changes
    common: Sequence[str]  # overrides of every variant
    config_dirs: Sequence[str]
    numbered: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def keys(self, chosen: Iterable[int]) -> list[str]:
        """The names of the changes with these numbers."""
        return [self.numbered[number].key for number in chosen]

    def variant(self, chosen: Iterable[int]) -> VariantSpec:
        """GOOD with the changes of these numbers."""
        return self.of([self.numbered[number] for number in sorted(chosen)])

    def of(self, changes: Sequence[Change]) -> VariantSpec:
        """GOOD with these changes; without a job if the options' rules refuse it.

        A changed list of options, such as surgery=[…], has all keys of its items.
        """
        changed = [*self.changes.overrides(changes), *self.common]
        replaced = tuple(f"{key}." for key in map(key_of, changed) if key in LISTS or "." in key)
        kept = [override for override in self.good.overrides if not key_of(override).startswith(replaced)]
        given, label = apply(kept, changed, self.config_dirs), " ".join(change.key for change in changes)
        found = VariantSpec(label or self.good.label, given, None, composes=self.good.composes)
        with collecting(found.problems):
            found.job = found.composes(given) if found.composes is not None else None
        return found


NAMED, NONE, UNRESOLVED = "named", "none", "not resolved"
FAILS = "fails"  # BAD has no figure: the search asks which subsets fail
LARGEST = 4  # most changes of a cause: a difference that needs more is spread over all of them
REST = 4  # the rest without the causes is also searched if it exceeds this fraction (1/4) of the whole difference

Subset = frozenset[int]  # of the changes, by their numbers
Decided = Callable[[Interval], bool]


@dataclass
class Measured:
    """The measurement of GOOD with a subset of the changes."""

    effect: Interval | None = None  # its difference from GOOD: 0 is none; None without a figure
    pairs: int = 0  # measured rounds or seeds
    problem: str = ""  # the reason why it has no figure
    diverged: bool = False  # its training failed to converge, which counts as bad


LEAST_ROUNDS, LEAST_SEEDS = 6, 4  # before an interval is trusted
SPREADS = 1.0  # a smaller difference in quality, in standard deviations of GOOD over its seeds, does not matter
LEAST_MARGIN = 0.005  # nor does one below this share of GOOD's figure

UNKNOWN = Interval(0.0, -math.inf, math.inf)


@dataclass
class BisectSettings:
    """The settings of `drivetrain bisect`."""

    rounds: Count = 40  # of each comparison, at most
    block_s: Positive = 0.4
    quality: bool = False
    seeds: Count = 16  # of each comparison with quality=true, at most
    budget_s: Positive = 3600.0  # for all comparisons, approximately


class GoodFails(Exception):
    """GOOD itself does not run, so nothing can be compared to it; the message is its error."""


IsOver = Callable[..., bool]  # called with the new figures


class Measurer:
    """Measures GOOD with subsets of the changes, and shows the current comparison on standard error.

    This one measures samples a second, in rounds of fresh processes: a round's figure is the ratio to GOOD's rate.
    """

    sign, least = " ×", LEAST_ROUNDS  # unit of an effect; figures that give an interval

    def __init__(self, subsets: Subsets, settings: BisectSettings, until: float) -> None:
        """`until`: of time.monotonic."""
        self.subsets, self.settings, self.until = subsets, settings, until
        self.unit, self.most = "samples/s", settings.rounds
        self.margin = math.log1p(EQUIVALENCE)  # the largest effect that does not matter
        self.number = 0  # of the comparison
        self.fails = False  # the effect is 1 if a subset fails while running, else 0, for a BAD that fails
        self.figures: dict[Subset, list[float]] = {}  # one of each round

    def effect(self, figures: Sequence[float]) -> Interval:
        """The effect in the figures of a subset."""
        return middle_of(list(map(math.log, figures)))

    def value(self, effect: float) -> str:
        """An effect as text."""
        return f"{math.exp(effect):.3f}"

    def add(self, variant: VariantSpec, figures: list[float], is_over: IsOver) -> str | None:
        """Add figures until `is_over`; return the reason if the variant fails. Raises GoodFails."""

        def ratios(row: compare.Row, base: compare.Row) -> list[float]:
            return [mine / theirs for mine, theirs in zip(row.rates, base.rates, strict=False)]

        def stop(rows: Sequence[compare.Row]) -> Sequence[compare.Row]:
            return [row for row in rows[1:] if is_over(*ratios(row, rows[0]))]  # none if the variant has failed

        good = self.subsets.variant(())
        limits = compare.CompareSettings(rounds=self.most - len(figures), block_s=self.settings.block_s)
        first, row = compare.measure([good, variant], limits, good.overrides, stop).rows
        if first.error is not None:
            raise GoodFails(first.error)
        figures += ratios(row, first)
        # The log with an error's traceback was removed with the run.
        return row.error and f"failed: {row.error.splitlines()[0].partition(' (traceback in')[0]}"

    def measure(self, chosen: Subset, decided: Decided) -> Measured:
        """Measure a subset until its effect decides the question or the budget is used, and show the result."""
        self.number += 1
        echo(f"comparison {self.number}: changes {numbers(chosen)} on top of GOOD", file=sys.stderr)
        found = self._measured(chosen, self.subsets.variant(chosen), decided)
        echo(f"comparison {self.number}: {' '.join(self.shown(found)) or found.problem}", file=sys.stderr)
        return found

    def _measured(self, chosen: Subset, variant: VariantSpec, decided: Decided) -> Measured:
        figures = self.figures.setdefault(chosen, [])

        def is_over(*new: float) -> bool:
            both = [*figures, *new]
            enough = len(both) >= self.least and decided(self.effect(both))
            return enough or len(both) >= self.most or time.monotonic() > self.until

        if variant.job is None:
            return Measured(problem=f"refused: {'; '.join(variant.problems)}")
        if self.fails:
            error = self.add(variant, [], lambda *_: True)
            failed = float(error is not None)
            return Measured(Interval(failed, failed, failed), 1, error or "")
        if not is_over() and (error := self.add(variant, figures, is_over)) is not None:
            return Measured(None, max(1, len(figures)), error, error.startswith("diverged"))
        return Measured(self.effect(figures) if figures else UNKNOWN, len(figures))

    def shown(self, found: Measured) -> tuple[str, ...]:
        """The effect and its interval as text; "" without a figure."""
        if found.effect is None:
            return ()
        if self.fails:
            return ("fails" if found.effect.middle else "runs",)
        if not found.pairs:
            return (f"not measured within budget_s={self.settings.budget_s:g}",)
        middle, *bounds = map(self.value, found.effect)
        known = all(map(math.isfinite, found.effect))
        return middle + self.sign, " – ".join(bounds) if known else "too few pairs for an interval"


class QualityMeasurer(Measurer):
    """Trains GOOD and subsets with the same seeds: a seed's figure is the difference of their final metrics."""

    sign, least = "", LEAST_SEEDS

    def __init__(self, subsets: Subsets, settings: BisectSettings, until: float) -> None:
        super().__init__(subsets, settings, until)
        self._good, self._trained, self._of_good = subsets.variant(()), Trained(), dict[int, float]()  # by seed
        self._job, self.most, self.margin = baseline_job([self._good]), settings.seeds, 0.0
        self.unit = self._metric = selected(self._job.run).across_runs.name

    def effect(self, figures: Sequence[float]) -> Interval:
        return mean(figures)

    def value(self, effect: float) -> str:
        return f"{effect:+.4f}"

    def add(self, variant: VariantSpec, figures: list[float], is_over: IsOver) -> str | None:
        with Steps() as progress, trainings("bisect", self._job, None, progress, self._trained) as train:
            while True:
                seed = self._job.run.runtime.seed + len(figures)
                good, run = train(self._good, seed), train(variant, seed)
                for each in (good, run):
                    if each.error is None and self._metric not in each.figures:
                        each.error = f"failed: it evaluates no {self._metric}"
                if good.error is not None:
                    raise GoodFails(good.error)
                if run.error is not None:
                    return run.error
                self._of_good[seed] = good.figures[self._metric]
                figures.append(run.figures[self._metric] - good.figures[self._metric])
                # The spread of GOOD over its seeds, or a small share of its mean if that is more.
                if len(seen := [*self._of_good.values()]) > 1:
                    self.margin = max(SPREADS * deviation(seen), LEAST_MARGIN * abs(statistics.fmean(seen)))
                if is_over():
                    return None


def numbers(chosen: Iterable[int]) -> str:
    """The numbers of changes, counted from 1, as ranges: 1–3, 5."""
    in_order = enumerate(sorted(number + 1 for number in chosen))
    ranges = [[number for _, number in of] for _, of in itertools.groupby(in_order, lambda at: at[1] - at[0])]
    return ", ".join(f"{found[0]}–{found[-1]}" if len(found) > 1 else str(found[0]) for found in ranges)


class Unresolved(Exception):
    """The budget is used before a question is decided, named in the message."""


@dataclass
class ChangeSearch:
    """A search among changes with the numbers 0 to n - 1, in an order in which every prefix can run."""

    n: int
    measurer: Measurer
    tried: dict[Subset, Measured] = field(default_factory=dict)
    outcome: str = ""
    causes: list[tuple[int, ...]] = field(default_factory=list)  # smallest sets of changes that make a difference
    rest: Measured | None = None  # BAD without the causes
    suspects: tuple[int, ...] = ()  # at the stop of the search: a cause is among these
    reason: str = ""  # the reason for the stop

    def run(self) -> str:
        """Search until the difference is explained, or the budget is used; return the outcome."""
        everything = range(self.n)
        whole = self.tried[frozenset(everything)] = self.measurer.measure(frozenset(everything), self._whole_is_decided)
        if whole.effect is None:
            self.outcome = FAILS
        elif self._is_small(whole.effect):
            self.outcome = NONE
        elif whole.effect.low <= 0 <= whole.effect.high:
            self.outcome, self.suspects, self.reason = UNRESOLVED, tuple(everything), "whether they differ is not certain"
        else:
            try:
                self._explain(everything, whole.effect.middle)
                self.suspects = ()
            except Unresolved as stopped:
                self.reason = str(stopped)
            self.outcome = NAMED if self.causes else UNRESOLVED
        return self.outcome

    @property
    def whole(self) -> Measured:
        """The measurement of BAD, once there is one."""
        return self.tried[frozenset(range(self.n))]

    @property
    def comparisons(self) -> int:
        """The number of measured subsets, BAD included."""
        return sum(found.pairs > 0 for found in self.tried.values())

    def _explain(self, left: Sequence[int], whole: float) -> None:
        """Find causes until BAD without them is nearly like GOOD."""
        target, goes_on = whole, True
        while goes_on:
            cause = self._cause(left, target)
            self.causes.append(cause)
            self.suspects = left = tuple(change for change in left if change not in cause)
            if not left:
                return
            goes_on, target = self._ask(left, 0.0, 2 * whole / REST)
            self.rest = self.tried[frozenset(left)]

    def _cause(self, items: Sequence[int], high: float) -> tuple[int, ...]:
        """A smallest set of `items` that makes the larger part of their effect, `high`."""
        cause: Subset = frozenset()
        low = 0.0
        while len(cause) < LARGEST:
            good, bad = 0, len(items)
            while bad - good > 1:  # the number of items whose effect, with the cause so far, is low and high
                self.suspects = tuple(sorted(cause.union(items[good:bad])))
                half = (good + bad) // 2
                is_high, effect = self._ask(cause.union(items[:half]), low, high)
                bad, high, good, low = (half, effect, good, low) if is_high else (bad, high, half, effect)
            cause, items = cause | {items[bad - 1]}, items[: bad - 1]
            is_cause, low = self._ask(cause, 0.0, high) if items else (True, low)
            if is_cause:
                return self._smallest(cause)
        self.suspects = tuple(sorted(cause.union(items)))
        raise Unresolved(f"no {LARGEST} changes make most of the difference: it is spread over many")

    def _smallest(self, cause: Subset) -> tuple[int, ...]:
        """The cause without unneeded changes, which noise may have added."""
        for change in sorted(cause):
            effect, smaller = self.tried[cause].effect, cause - {change}
            if smaller and effect is not None and self._ask(smaller, 0.0, effect.middle)[0]:
                cause = smaller
        return tuple(sorted(cause))

    def _ask(self, chosen: Iterable[int], low: float, high: float) -> tuple[bool, float]:
        """True if the effect of a subset is nearer to `high` than to `low`, and the effect. Raises Unresolved.

        A diverging subset counts as `high`, and one that cannot run as `low`.
        """
        middle, step, subset = (low + high) / 2, abs(high - low), frozenset(chosen)

        def on_one_side(found: Interval) -> bool:
            return not found.low <= middle <= found.high

        def decided(found: Interval) -> bool:  # a very narrow interval near the middle may go either way
            width = found.high - found.low
            return (width <= step and on_one_side(found)) or width <= step / 2

        found = self.tried.get(subset)
        if found is None or (found.effect is not None and not decided(found.effect)):
            found = self.tried[subset] = self.measurer.measure(subset, decided)
        if found.effect is None:
            return found.diverged, high if found.diverged else low
        if not decided(found.effect) and not on_one_side(found.effect):
            raise Unresolved("the noise is too large for the rounds, seeds or seconds that were allowed")
        return (found.effect.middle - middle) * (high - low) > 0, found.effect.middle

    def _whole_is_decided(self, found: Interval) -> bool:
        known = found.high - found.low <= abs(found.middle) and not found.low <= 0 <= found.high
        return known or self._is_small(found)

    def _is_small(self, found: Interval) -> bool:
        return max(abs(found.low), abs(found.high)) <= self.measurer.margin


def tried(search: ChangeSearch) -> sheet.Table:
    """The table of the tries, in the order of the comparisons."""
    header = ["changes on top of GOOD", search.measurer.unit, "95 % interval", "of the difference", "pairs", "because"]
    whole = search.whole.effect.middle if search.whole.effect is not None and search.outcome != NONE else 0.0
    rows = []
    for chosen, found in search.tried.items():
        middle, interval, *_ = (*search.measurer.shown(found), "", "")
        share = f"{round(100 * found.effect.middle / whole)} %" if found.effect is not None and whole else ""
        if found.pairs or found.problem:
            pairs = str(found.pairs or "")
            rows.append([numbers(chosen), middle or "–", interval, share, pairs, printable(found.problem)])
    return sheet.Table(header, rows, "What was tried", ("because",), sortable=True).used(always=2)

"""`drivetrain bisect`: which of the changes from GOOD to BAD make it slower, or its result worse: prefix halving on effects.

Subsets of the changes are put on top of GOOD, and each has an effect with an interval. A binary search over the first changes
follows the larger part of the effect: the first half of them, then the first quarter or three quarters, and so on, until one
change is left whose addition makes the larger step. If it makes that step alone, it is a cause. Else it needs partners: the same
search, with this change always there, finds them among those before it. Then BAD is measured without the cause, and what
remains is searched in the same way, so causes that add up are all named.

A single cause among n changes takes at most 3 + log2 n comparisons. A subset that cannot run counts as not bad.
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from drivetrain.config.catalog import LISTS
from drivetrain.config.hydra_words import recipe_word, translated
from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.option import Count, Positive
from drivetrain.core.overrides import format_value, key_of
from drivetrain.core.paths import expanded
from drivetrain.core.selection import selected
from drivetrain.core.typed import JsonObject
from drivetrain.launch.job import Job, is_of_this_user, of_run, recorded_environment, recorded_settings
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure import verbs
from drivetrain.measure.benchmark import compare
from drivetrain.measure.benchmark.compare import Row
from drivetrain.measure.benchmark.variants import Trained, VariantSpec, baseline_job, refuse_resume, trainings
from drivetrain.measure.changes import Change, Changes, apply, in_order
from drivetrain.measure.intervals import EQUIVALENCE, Interval, deviation, mean, ratio
from drivetrain.recipe import places
from drivetrain.recipe.safe_yaml import printable
from drivetrain.run import environment
from drivetrain.ui.output import echo
from drivetrain.ui.progress import Steps
from drivetrain.ui.sheet import Section, Sheet, Table, folded, words


@dataclass
class Side:
    """GOOD or BAD: its name as it was given, and its overrides, which for a run come on top of its own config."""

    name: str
    overrides: list[str]
    config_dirs: Sequence[str]
    run_dir: Path | None = None
    recorded: JsonObject = field(default_factory=dict)  # of a run of this user: its environment.json

    def job(self, changes: Sequence[str] = ()) -> Job:
        """The job with these overrides on top. Raises UserError."""
        given = self.changed(changes)
        if self.run_dir is None:
            return prepare_job(given, self.config_dirs)
        dirs = self.config_dirs or self.recorded.get("config_dirs", [])
        return of_run(self.run_dir, given, dirs, recorded_settings(self.recorded, given))

    def changed(self, changes: Sequence[str]) -> list[str]:
        """The side's overrides with these on top; a list of options, as surgery=[…], has all keys of its items."""
        keys = {key_of(change) for change in changes}
        below = tuple(f"{key}." for key in keys if key in LISTS or "." in key)
        kept = [override for override in self.overrides if not key_of(override).startswith(below)]
        return apply(kept, changes, self.config_dirs)


def read_side(word: str, overrides: Sequence[str], config_dirs: Sequence[str]) -> Side:
    """The side that a word of the command line names, with the overrides that both sides have. Raises UserError."""
    path = expanded(word)
    if "=" in word and not os.path.exists(path) and not places.is_address(word):
        try:
            own = translated(shlex.split(word), config_dirs)  # quotes within the word are the shell's
        except ValueError as error:
            raise UserError(f"'{word}' is no list of overrides: {error}") from None
        if wrong := [override for override in own if "=" not in override]:
            raise UserError(f"'{wrong[0]}' in '{word}' is not of the form key=value")
        return Side(word, [*own, *overrides], config_dirs)
    if path.is_dir():
        recorded = recorded_environment(path)
        return Side(word, [*overrides], config_dirs, path, recorded if is_of_this_user(recorded) else {})
    name = recipe_word(word, config_dirs)
    places.load(name.strip("'"))
    return Side(word, [f"recipe={name}", *overrides], config_dirs)


NAMED, NONE, UNRESOLVED = "named", "none", "not resolved"
FAILS = "fails"  # BAD has no figure: it can be searched by which subsets fail
LARGEST = 4  # changes that a cause may consist of: a difference that needs more is spread over all of them
REST = 4  # what remains without the causes is searched too if it is more than a quarter of the whole difference

Subset = frozenset[int]  # of the changes, by their numbers
Decided = Callable[[Interval], bool]


@dataclass
class Measured:
    """The measurement of GOOD with a subset of the changes."""

    effect: Interval | None = None  # its difference from GOOD: 0 is none; None where it has no figure
    pairs: int = 0  # rounds or seeds that were measured
    problem: str = ""  # why it has no figure
    diverged: bool = False  # it has none because its training failed to converge, which counts as bad


LEAST_ROUNDS, LEAST_SEEDS = 6, 4  # before an interval is trusted
SPREADS = 1.0  # a difference in quality that is smaller than so many standard deviations of GOOD over its seeds does not matter
LEAST_MARGIN = 0.005  # nor does one below this share of GOOD's figure

UNKNOWN = Interval(0.0, -math.inf, math.inf)


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
    """GOOD with any subset of the changes on top, as a variant of a comparison."""

    good: Side
    changes: Changes
    common: list[str]  # overrides of every variant
    numbered: list[Change] = field(default_factory=list)

    def variant(self, chosen: Subset) -> VariantSpec:
        """GOOD with the changes of these numbers; without a job where the options' rules refuse it."""
        return self.of([self.numbered[number] for number in sorted(chosen)])

    def of(self, changes: Sequence[Change]) -> VariantSpec:
        """GOOD with these changes."""
        label = " ".join(change.key for change in changes) or self.good.name
        given = self.good.changed([*self.changes.overrides(changes), *self.common])
        try:
            return VariantSpec(label, given, self.good.job(given), composes=self.good.job)
        except UserError as error:
            return VariantSpec(label, given, None, error.problems)


IsOver = Callable[..., bool]  # of the figures that are new, of a subset and of GOOD


class Measurer(ABC):
    """Measures GOOD with subsets of the changes, and says on standard error which comparison is under way.

    A subclass adds pairs of figures, of a subset and of GOOD beside it, and has the effect that they show.
    """

    unit: str
    sign = ""  # beside an effect
    least: int  # pairs that give an interval
    interval: Callable[[Sequence[float], Sequence[float]], Interval]
    value: Callable[[float], str]  # an effect as text

    def __init__(self, subsets: Subsets, settings: Settings, until: float) -> None:
        """`until`: of time.monotonic."""
        self.subsets, self.settings, self.until = subsets, settings, until
        self.most = settings.seeds if settings.quality else settings.rounds
        self.number = 0  # of the comparison
        self.fails = False  # the effect is whether a subset fails while it runs, for a BAD that does: 1 or 0
        self.errors: dict[Subset, str | None] = {}  # of those that were asked whether they fail
        self.pairs: dict[Subset, tuple[list[float], list[float]]] = {}

    @property
    @abstractmethod
    def margin(self) -> float:
        """The largest effect that does not matter."""

    @abstractmethod
    def add(self, variant: VariantSpec, mine: list[float], base: list[float], is_over: IsOver) -> str | None:
        """Add pairs until it is over; return why the variant fails, where it does. Raises GoodFails."""

    def measure(self, chosen: Subset, decided: Decided) -> Measured:
        """Measure a subset until its effect decides the question or the budget is used, and say what was found."""
        self.number += 1
        echo(f"comparison {self.number}: changes {numbers(chosen)} on top of GOOD", file=sys.stderr)
        variant = self.subsets.variant(chosen)
        if variant.job is None:
            found = Measured(problem=f"refused: {'; '.join(variant.problems)}")
        elif self.fails:
            if chosen not in self.errors:
                self.errors[chosen] = self.add(variant, [], [], lambda *_: True)
            failed = float(self.errors[chosen] is not None)
            found = Measured(Interval(failed, failed, failed), 1, self.errors[chosen] or "")
        else:
            found = self._effect(chosen, variant, decided)
        echo(f"comparison {self.number}: {' '.join(self.shown(found)) or found.problem}", file=sys.stderr)
        return found

    def _effect(self, chosen: Subset, variant: VariantSpec, decided: Decided) -> Measured:
        """The effect of a variant that can be composed."""
        mine, base = self.pairs.setdefault(chosen, ([], []))

        def is_over(new: Sequence[float] = (), old: Sequence[float] = ()) -> bool:
            count = len(mine) + len(new)
            enough = count >= self.least and decided(self.interval([*mine, *new], [*base, *old]))
            return enough or count >= self.most or time.monotonic() > self.until

        if not is_over() and (error := self.add(variant, mine, base, is_over)) is not None:
            return Measured(pairs=max(1, len(mine)), problem=error, diverged=error.startswith("diverged"))
        return Measured(self.interval(mine, base) if mine else UNKNOWN, len(mine))

    def shown(self, found: Measured) -> tuple[str, ...]:
        """The effect and its interval as text; nothing where there is no figure."""
        if found.effect is None:
            return ()
        if self.fails:
            return ("fails" if found.effect.middle else "runs",)
        if not found.pairs:
            return (f"not measured within budget_s={self.settings.budget_s:g}",)
        middle, *bounds = map(self.value, found.effect)
        known = all(map(math.isfinite, found.effect))
        return middle + self.sign, " – ".join(bounds) if known else "too few pairs for an interval"


class Unresolved(Exception):
    """The budget is used before a question is decided; the message says which."""


@dataclass
class Search:
    """A search among changes with the numbers 0 to n - 1, in an order in which every first few of them can run."""

    n: int
    measurer: Measurer
    tried: dict[Subset, Measured] = field(default_factory=dict)
    outcome: str = ""
    causes: list[tuple[int, ...]] = field(default_factory=list)  # smallest sets of changes that make a difference
    rest: Measured | None = None  # BAD without the causes
    suspects: tuple[int, ...] = ()  # where the search stopped: a cause is among these
    reason: str = ""  # why it stopped

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
        """The number of subsets that were measured, BAD included."""
        return sum(found.pairs > 0 for found in self.tried.values())

    def _explain(self, left: Sequence[int], whole: float) -> None:
        """Find causes until BAD without them is nearly as GOOD."""
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
            while bad - good > 1:  # the effect of so many items, with the cause so far, is low and high
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
        """The cause without the changes that it does not need, which noise may have put there."""
        for change in sorted(cause):
            effect, smaller = self.tried[cause].effect, cause - {change}
            if smaller and effect is not None and self._ask(smaller, 0.0, effect.middle)[0]:
                cause = smaller
        return tuple(sorted(cause))

    def _ask(self, chosen: Iterable[int], low: float, high: float) -> tuple[bool, float]:
        """True if the effect of a subset is nearer to `high` than to `low`, and the effect. Raises Unresolved.

        Of one that diverges it counts as `high`, and of one that cannot run as `low`.
        """
        middle, step, subset = (low + high) / 2, abs(high - low), frozenset(chosen)

        def on_one_side(found: Interval) -> bool:
            return not found.low <= middle <= found.high

        def decided(found: Interval) -> bool:  # one that is very narrow near the middle may go either way
            width = found.high - found.low
            return (width <= step and on_one_side(found)) or width <= step / 2

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


def log_ratio(mine: Sequence[float], base: Sequence[float]) -> Interval:
    """The logarithm of the ratio of paired rates, with its 95 % interval."""
    middle, low, high = ratio(mine, base)
    return Interval(math.log(middle), math.log(low) if low else -math.inf, math.log(high))


def mean_difference(mine: Sequence[float], base: Sequence[float]) -> Interval:
    """The mean difference of paired figures, with its 95 % interval."""
    return mean([a - b for a, b in zip(mine, base, strict=True)])


class Speed(Measurer):
    """Measures samples a second in rounds of fresh processes; an effect is the logarithm of the ratio to GOOD's."""

    margin = math.log1p(EQUIVALENCE)
    unit, sign, least = "samples/s", " ×", LEAST_ROUNDS
    interval, value = staticmethod(log_ratio), staticmethod(lambda effect: f"{math.exp(effect):.3f}")

    def add(self, variant: VariantSpec, mine: list[float], base: list[float], is_over: IsOver) -> str | None:
        def stop(rows: Sequence[Row]) -> Sequence[Row]:
            old, *others = (row.rates for row in rows)  # there are no others where the variant has failed
            return rows[1:] if is_over(others[0] if others else (), old) else ()

        good = self.subsets.variant(frozenset())
        limits = compare.Settings(rounds=self.most - len(mine), block_s=self.settings.block_s)
        first, row = compare.measure([good, variant], limits, good.overrides, stop).rows
        if first.error is not None:
            raise GoodFails(first.error)
        mine += row.rates
        base += first.rates[: len(row.rates)]
        # The log in which an error's traceback is has gone with the run.
        return row.error and f"failed: {row.error.splitlines()[0].partition(' (traceback in')[0]}"


class Quality(Measurer):
    """Trains GOOD and subsets with the same seeds; an effect is the mean difference of the final metric, seed by seed."""

    least = LEAST_SEEDS
    interval, value = staticmethod(mean_difference), staticmethod("{:+.4f}".format)

    def __init__(self, subsets: Subsets, settings: Settings, until: float) -> None:
        super().__init__(subsets, settings, until)
        self._good, self._trained = subsets.variant(frozenset()), Trained()
        self._run = baseline_job([self._good]).run
        self.unit = selected(self._run).name

    @property
    def margin(self) -> float:
        """The spread of GOOD over its seeds, or a small share of its mean where that is more."""
        found = max((base for _, base in self.pairs.values()), key=len, default=[])
        if len(found) < 2:
            return 0.0
        return max(SPREADS * deviation(found), LEAST_MARGIN * abs(statistics.fmean(found)))

    def add(self, variant: VariantSpec, mine: list[float], base: list[float], is_over: IsOver) -> str | None:
        while True:
            seed = self._run.runtime.seed + len(mine)
            with Steps() as progress, trainings("bisect", baseline_job([self._good]), None, progress, self._trained) as train:
                good, run = train(self._good, seed), train(variant, seed)
            for each in (good, run):
                if each.error is None and self.unit not in each.figures:
                    each.error = f"failed: it evaluates no {self.unit}"
            if good.error is not None:
                raise GoodFails(good.error)
            if run.error is not None:
                return run.error
            mine.append(run.figures[self.unit])
            base.append(good.figures[self.unit])
            if is_over():
                return None


def numbers(chosen: Iterable[int]) -> str:
    """The numbers of changes, counted from 1, as ranges: 1–3, 5."""
    in_order = enumerate(sorted(number + 1 for number in chosen))
    ranges = [[number for _, number in of] for _, of in itertools.groupby(in_order, lambda at: at[1] - at[0])]
    return ", ".join(f"{found[0]}–{found[-1]}" if len(found) > 1 else str(found[0]) for found in ranges)


@dataclass
class Report:
    """A finished bisection."""

    good: str
    bad: str
    subsets: Subsets
    search: Search
    measurer: Measurer
    notes: list[str]
    seconds: float

    def table(self) -> Table:
        """The table of what was tried, in the order of the comparisons."""
        header = ["changes on top of GOOD", self.measurer.unit, "95 % interval", "of the difference", "pairs", "because"]
        rows = [self._row(numbers(chosen), found) for chosen, found in self.search.tried.items() if found.pairs or found.problem]
        return Table(header, rows, "What was tried", ("because",), sortable=True).used(always=2)

    def _row(self, name: str, found: Measured) -> list[str]:
        middle, interval, *_ = (*self.measurer.shown(found), "", "")
        whole = self.search.whole.effect.middle if self.search.whole.effect is not None else 0.0
        of_whole = found.effect is not None and whole and self.search.outcome != NONE
        share = f"{round(100 * found.effect.middle / whole)} %" if found.effect is not None and of_whole else ""
        return [name, middle or "–", interval, share, str(found.pairs or ""), printable(found.problem)]

    def sheet(self) -> Sheet:
        """The answer, what was tried, and the changes by their numbers."""
        answer, *more = self.conclusion()
        changes = folded("The changes", [table_of(self.subsets.numbered)], is_open=True)
        sections: list[Section] = [self.table(), words(*more, *self.notes), changes]
        return Sheet(f"What makes {self.bad} differ from {self.good} – drivetrain bisect", answer, sections)

    def conclusion(self) -> list[str]:
        """The answer, one sentence a line."""
        search = self.search
        cost = f"{search.comparisons} comparisons, {sum(f.pairs for f in search.tried.values())} pairs, {self.seconds:.0f} s"
        if search.outcome == NONE:
            return [f"none: they do not differ ({self._figures(search.whole)}; {cost})"]
        lines = []
        for cause in search.causes:
            how = "alone" if len(cause) == 1 else "together, and none of them is enough without the others"
            figures = self._figures(search.tried[frozenset(cause)])
            lines.append(f"{', '.join(self._keys(cause))}: on top of GOOD {how}: {figures}")
        if search.rest is not None and search.causes:
            lines.append(f"BAD without {'it' if len(search.causes) == 1 else 'these'}: {self._figures(search.rest)}")
        if search.reason:
            what = "whether anything else matters is not resolved" if search.causes else "not resolved within the budget"
            suspects = ", ".join(self._keys(search.suspects))
            more = "" if self.measurer.fails else " (rounds=, seeds= and budget_s= allow more)"
            lines.append(f"{what}: {search.reason}{more}; what is left to suspect: {suspects}")
        return [*lines, f"found by {cost}; BAD: {self._figures(search.whole)}"]

    def as_dict(self, settings: Settings, facts: JsonObject) -> JsonObject:
        """The content of bisect.json."""
        search, changes = self.search, self.subsets.numbered
        causes = [
            {
                "changes": self._keys(cause), "effect": _plain(search.tried[frozenset(cause)].effect),
                "overrides": self.subsets.changes.overrides([changes[number] for number in cause]),
            }
            for cause in search.causes
        ]  # fmt: skip
        tried = [
            {"changes": self._keys(sorted(chosen)), **asdict(found), "effect": _plain(found.effect)}
            for chosen, found in search.tried.items()
        ]
        return {
            "good": self.good, "bad": self.bad, "outcome": search.outcome, "unit": self.measurer.unit, "causes": causes,
            "whole": _plain(search.whole.effect), "rest": _plain(search.rest.effect) if search.rest else None,
            "suspects": self._keys(search.suspects), "reason": search.reason, "notes": self.notes,
            "changes": [{"key": c.key, "good": c.good, "bad": c.bad} for c in changes], "tried": tried,
            "comparisons": search.comparisons, "seconds": self.seconds, "settings": asdict(settings), "environment": facts,
        }  # fmt: skip

    def _figures(self, found: Measured) -> str:
        middle, *interval = self.measurer.shown(found) or (found.problem,)
        return f"{middle} {self.measurer.unit} ({interval[0]})" if interval else middle

    def _keys(self, chosen: Iterable[int]) -> list[str]:
        return [self.subsets.numbered[number].key for number in chosen]


def _plain(effect: Interval | None) -> list[float | None] | None:
    """An effect as JSON has it: estimate, low, high; null for a bound where there were too few pairs."""
    return [value if math.isfinite(value) else None for value in effect] if effect is not None else None


def table_of(changes: Sequence[Change]) -> Table:
    """The changes with their numbers."""
    rows = [(str(number), *map(printable, (c.key, c.good, c.bad))) for number, c in enumerate(changes, 1)]
    return Table(("number", "change", "GOOD", "BAD"), rows, "The changes", ("change", "GOOD", "BAD"))


SAME_DATA = ("task", "data")  # groups whose options the two must share
NOT_TOLD = ("output_dir", "recipe", "resume", "resume_changed")  # if they differ
NEVER_TRIED = (*NOT_TOLD, "trust", "select", "logger")
# The length of a run, and its random numbers: a step is as fast with others.
NOT_OF_SPEED = ("epochs", "updates", "evaluate_every", "stop", "runtime.seed")
NOT_OF_QUALITY = ("runtime.seed", "saving")  # seeds are paired, and a saved run learns nothing from that


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain bisect`; return its exit code."""
    settings, words = verbs.split(argv, Settings)
    _check(settings, words)
    subsets, bad, notes = prepare(words, config_dirs, settings.quality)
    began = time.monotonic()
    measurer: Measurer = (Quality if settings.quality else Speed)(subsets, settings, began + settings.budget_s)
    table_of(subsets.numbered).show()
    for note in notes:
        echo(note)
    try:
        if (search := Search(len(subsets.numbered), measurer)).run() == FAILS:
            echo(f"BAD does not run to a figure ({search.whole.problem}): what makes it fail?")
            measurer.fails, measurer.unit = True, "runs"
            (search := Search(len(subsets.numbered), measurer)).run()
    except GoodFails as error:
        echo(f"error: {words[0]} itself does not run, so nothing can be compared to it: {error}", file=sys.stderr)
        return FAILED
    found = Report(words[0], words[1], subsets, search, measurer, notes, time.monotonic() - began)
    sheet, content = found.sheet(), found.as_dict(settings, environment.describe(list(argv), bad.config_hash, {}))
    echo()
    sheet.show()
    verbs.write(verbs.folder(bad, "bisect"), "bisect", sheet, ["bisect", *argv], content)
    return FAILED if search.outcome == UNRESOLVED else DONE


def prepare(words: Sequence[str], config_dirs: Sequence[str], quality: bool) -> tuple[Subsets, Job, list[str]]:
    """GOOD and the changes that lead to BAD, BAD's job, and what the user should know. Raises UserError."""
    both, problems = [], []
    for word in words[:2]:
        try:
            side = read_side(word, words[2:], config_dirs)
            both.append((side, side.job()))
        except UserError as error:
            problems += [problem if word in problem else f"{word}: {problem}" for problem in error.problems]
    if problems:
        raise UserError(dict.fromkeys(problems))
    (side, job), (_, other) = both
    if different := list(_different_data(job, other)):
        raise UserError(different)
    changes = Changes(job, other, {*NEVER_TRIED, *(NOT_OF_QUALITY if quality else NOT_OF_SPEED)})
    found = changes.found()
    not_tried = [key for key in changes.not_made if key not in NOT_TOLD]
    if not found:
        raise UserError(_same(words, not_tried, quality))
    subsets = Subsets(side, changes, list(_common(words[2:], found, job, other)))
    refusals: dict[str, str] = {}

    def can_run(chosen: Sequence[Change]) -> bool:
        variant = subsets.of(chosen)
        for problem in variant.problems[:1]:
            refusals.setdefault(chosen[-1].key, problem)
        return variant.job is not None

    subsets.numbered = in_order(found, can_run)
    notes = [f"kept together: {c.key} ({refusals.get(c.parts[0].key, '')})" for c in subsets.numbered if c.parts]
    if not_tried:
        notes.append(f"not tried, though they differ: {', '.join(not_tried)}")
    whole = subsets.variant(frozenset(range(len(subsets.numbered))))
    if whole.job is None:
        raise UserError(whole.problems)
    if left := [key for key in changes.left_over(whole.job) if not key.startswith("saving")]:
        raise UserError(f"{words[1]} cannot be reached from {words[0]} by overrides: they still differ in {', '.join(left)}")
    return subsets, whole.job, notes


def _check(settings: Settings, words: Sequence[str]) -> None:
    """Raise UserError for words that are not GOOD, BAD and overrides, and for too few rounds or seeds."""
    refuse_resume("bisect", words)
    if len(words) < 2:
        raise UserError(
            f"drivetrain bisect wants GOOD and BAD, each a run's directory, a recipe or overrides in quotes: given {len(words)}"
        )
    if wrong := [word for word in words[2:] if "=" not in word]:
        raise UserError(f"'{wrong[0]}': after GOOD and BAD come overrides of both, of the form key=value")
    for name, count, least in (("rounds", settings.rounds, LEAST_ROUNDS), ("seeds", settings.seeds, LEAST_SEEDS)):
        if count < least:
            raise UserError(f"{name}={count}: fewer than {least} {name} give no interval: set {name}={least}")


def _different_data(good: Job, bad: Job) -> Iterator[str]:
    """The reasons why the two are about different data, whose figures nobody can compare."""
    local = {key for key in good.machine_local_keys | bad.machine_local_keys if key.startswith("data.")}
    old, new = (job.composed.settings() for job in (good, bad))
    for key in (*SAME_DATA, *sorted(local)):
        if old.get(key) != new.get(key):
            hint = f"give both the same, as {key}={format_value(new.get(key))} after them"
            yield f"the two are about different data: {key}={old.get(key)} and {key}={new.get(key)}: {hint}"


def _same(words: Sequence[str], not_tried: Sequence[str], quality: bool) -> str:
    """The message that there is nothing to bisect."""
    if not_tried:
        no_effect = "no result depends on it" if quality else "a step is as fast with either: quality=true bisects the result"
        return f"{words[0]} and {words[1]} differ only in {', '.join(not_tried)}: {no_effect}"
    hint = f"`drivetrain recipe diff {words[0]} {words[1]}` shows where they ran" if "=" not in words[0] + words[1] else ""
    return f"{words[0]} and {words[1]} are the same config, so no change can make a difference" + (hint and f": {hint}")


def _common(words: Sequence[str], found: Sequence[Change], good: Job, bad: Job) -> list[str]:
    """The overrides of every variant: no trackers, no checkpoints unless saving is one of the changes, and both sides' trust."""
    given = {word.partition("=")[0].split(".")[0] for word in words}
    common = ["logger=[files]"] if "logger" not in given else []
    if "saving" not in {*given, *(change.key.split(".")[0] for change in found)}:
        common.append("saving=none")
    trust = list(dict.fromkeys([*good.run.values["trust"], *bad.run.values["trust"]]))
    return [*common, *([f"trust=[{','.join(trust)}]"] if trust else [])]

"""How a subset of the changes is measured: its speed by an interleaved benchmark, or its quality by training with paired seeds.

Both go on with the pairs that a subset has, so that a question that needs a narrower interval adds to what is there.
"""

from __future__ import annotations

import math
import shlex
import statistics
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.config.catalog import LISTS
from drivetrain.config.hydra_idioms import recipe_word, translated
from drivetrain.core.errors import UserError
from drivetrain.core.option import Count, Positive
from drivetrain.core.overrides import key_of
from drivetrain.core.paths import expanded
from drivetrain.core.selection import selected
from drivetrain.launch.job import Job, is_of_this_user, of_run, recorded_environment, recorded_settings
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure.benchmark import comparison, quality
from drivetrain.measure.benchmark.arms import ArmSpec, baseline_job
from drivetrain.measure.benchmark.interleave import Arm, StoppingRule, never_stop
from drivetrain.measure.benchmark.noninferiority import TrainedRun
from drivetrain.measure.bisect.search import Measured, Subset
from drivetrain.measure.changes import Change, Changes
from drivetrain.measure.intervals import EQUIVALENCE, Interval, deviation, mean, ratio
from drivetrain.measure.overrides import apply
from drivetrain.measure.training import trainings
from drivetrain.recipe import places
from drivetrain.ui.output import echo
from drivetrain.ui.progress import Steps


@dataclass
class Side:
    """GOOD or BAD: its name as it was given, and its overrides, which for a run come on top of its own config."""

    name: str
    overrides: list[str]
    config_dirs: Sequence[str]
    run_dir: Path | None = None
    recorded: dict[str, Any] = field(default_factory=dict)  # of a run of this user: its environment.json

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
    """What a word of the command line names, with the overrides that both sides have. Raises UserError."""
    path = expanded(word)
    if "=" in word and not _is_path(path) and not places.is_address(word):
        own = translated(_words(word), config_dirs)
        if wrong := [override for override in own if "=" not in override]:
            raise UserError(f"'{wrong[0]}' in '{word}' is not of the form key=value")
        return Side(word, [*own, *overrides], config_dirs)
    if path.is_dir():
        recorded = recorded_environment(path)
        return Side(word, [*overrides], config_dirs, path, recorded if is_of_this_user(recorded) else {})
    name = recipe_word(word, config_dirs)
    places.load(name.strip("'"))
    return Side(word, [f"recipe={name}", *overrides], config_dirs)


def _is_path(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a list of overrides that is too long for a file's name
        return False


def _words(word: str) -> list[str]:
    """The overrides in a quoted list; quotes within them are the shell's. Raises UserError."""
    try:
        return shlex.split(word)
    except ValueError as error:
        raise UserError(f"'{word}' is no list of overrides: {error}") from None


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
    """GOOD with any subset of the changes on top, as a variant of a comparison."""

    good: Side
    changes: Changes
    common: list[str]  # overrides of every variant
    numbered: list[Change] = field(default_factory=list)

    def variant(self, chosen: Subset) -> ArmSpec:
        """GOOD with the changes of these numbers; without a job where the options' rules refuse it."""
        return self.of([self.numbered[number] for number in sorted(chosen)])

    def of(self, changes: Sequence[Change]) -> ArmSpec:
        """GOOD with these changes."""
        given = [*self.changes.overrides(changes), *self.common]
        label = " ".join(change.key for change in changes) or self.good.name
        try:
            return ArmSpec(label, self.good.changed(given), self.good.job(given), composes=self.good.job)
        except UserError as error:
            return ArmSpec(label, self.good.changed(given), None, error.problems)


@dataclass
class Measurer:
    """Measures GOOD with subsets of the changes, and says on standard error which comparison is under way."""

    subsets: Subsets
    settings: Settings
    until: float  # of time.monotonic
    number: int = 0  # of the comparison
    fails: bool = False  # the effect is whether a subset fails while it runs, for a BAD that does: 1 or 0
    errors: dict[Subset, str | None] = field(default_factory=dict)  # of those that were asked whether they fail

    unit, sign = "", ""

    @property
    @abstractmethod
    def margin(self) -> float:
        """The largest effect that does not matter."""

    def measure(self, chosen: Subset, decided: Decided) -> Measured:
        """Measure a subset until its effect decides the question or the budget is used, and say what was found."""
        self.number += 1
        echo(f"comparison {self.number}: changes {numbers(chosen)} on top of GOOD", file=sys.stderr)
        variant = self.subsets.variant(chosen)
        if variant.job is None:
            found = Measured(problem=f"refused: {'; '.join(variant.problems)}")
        elif self.fails:
            if chosen not in self.errors:
                self.errors[chosen] = self.failure(chosen, variant)
            failed = float(self.errors[chosen] is not None)
            found = Measured(Interval(failed, failed, failed), 1, self.errors[chosen] or "")
        else:
            found = self.effect(chosen, variant, decided)
        echo(f"comparison {self.number}: {' '.join(self.shown(found)) or found.problem}", file=sys.stderr)
        return found

    @abstractmethod
    def effect(self, chosen: Subset, variant: ArmSpec, decided: Decided) -> Measured:
        """The effect of a variant that can be composed."""

    @abstractmethod
    def failure(self, chosen: Subset, variant: ArmSpec) -> str | None:
        """Why a variant fails while it runs; None where it runs."""

    @abstractmethod
    def value(self, effect: float) -> str:
        """An effect as text."""

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


@dataclass
class Speed(Measurer):
    """Measures samples a second in rounds of fresh processes; an effect is the logarithm of the ratio to GOOD's."""

    rates: dict[Subset, tuple[list[float], list[float]]] = field(default_factory=dict)  # of the subset and of GOOD, by round

    margin = math.log1p(EQUIVALENCE)
    unit, sign = "samples/s", " ×"

    def value(self, effect: float) -> str:
        return f"{math.exp(effect):.3f}"

    def effect(self, chosen: Subset, variant: ArmSpec, decided: Decided) -> Measured:
        mine, base = self.rates.setdefault(chosen, ([], []))

        def is_over(new: Sequence[float] = (), old: Sequence[float] = ()) -> bool:
            count = len(mine) + len(new)
            enough = count >= LEAST_ROUNDS and decided(log_ratio([*mine, *new], [*base, *old]))
            return enough or count >= self.settings.rounds or time.monotonic() > self.until

        def stop(live: Sequence[Arm], rounds: int) -> Iterator[Arm]:
            old, *others = ([block.rate for block in each.blocks] for each in live)
            if is_over(others[0] if others else (), old):  # there are no others where the variant has failed
                yield from live[1:]

        if not is_over():
            row = self._compare(variant, self.settings.rounds - len(mine), stop).rows
            mine += row[1].rates
            base += row[0].rates[: len(row[1].rates)]
            if (error := row[1].error) is not None:
                return Measured(pairs=max(1, len(mine)), problem=f"failed: {without_log(error)}")
        return Measured(log_ratio(mine, base) if mine else UNKNOWN, len(mine))

    def failure(self, chosen: Subset, variant: ArmSpec) -> str | None:
        error = self._compare(variant, 1, never_stop).rows[1].error
        return error and without_log(error)

    def _compare(self, variant: ArmSpec, rounds: int, stop: StoppingRule) -> comparison.Comparison:
        good = self.subsets.variant(frozenset())
        limits = comparison.Settings(rounds=rounds, block_s=self.settings.block_s)
        done = comparison.measure([good, variant], limits, good.overrides, stop)
        if done.rows[0].error is not None:
            raise GoodFails(done.rows[0].error)
        return done


def without_log(error: str) -> str:
    """An error's first line, without the place of its traceback, which is gone with the run."""
    return error.splitlines()[0].partition(" (traceback in")[0]


def log_ratio(mine: Sequence[float], base: Sequence[float]) -> Interval:
    """The logarithm of the ratio of paired rates, with its 95 % interval."""
    middle, low, high = ratio(mine, base)
    return Interval(math.log(middle), math.log(low) if low else -math.inf, math.log(high))


class Quality(Measurer):
    """Trains GOOD and subsets with the same seeds; an effect is the mean difference of the final metric, seed by seed."""

    def __init__(self, subsets: Subsets, settings: Settings, until: float) -> None:
        super().__init__(subsets, settings, until)
        self._good = subsets.variant(frozenset())
        self.unit = selected(baseline_job([self._good]).run).name
        self._trained: dict[tuple[Subset, int], TrainedRun] = {}

    @property
    def margin(self) -> float:
        """The spread of GOOD over its seeds, or a small share of its mean where that is more."""
        runs = [run for (chosen, _), run in self._trained.items() if not chosen]
        found = [run.figures[self.unit] for run in runs if self.unit in run.figures]
        if len(found) < 2:
            return 0.0
        return max(SPREADS * deviation(found), LEAST_MARGIN * abs(statistics.fmean(found)))

    def value(self, effect: float) -> str:
        return f"{effect:+.4f}"

    def effect(self, chosen: Subset, variant: ArmSpec, decided: Decided) -> Measured:
        differences: list[float] = []
        for number in range(self.settings.seeds):
            enough = len(differences) >= LEAST_SEEDS and decided(mean(differences))
            if (chosen, number) not in self._trained and (enough or time.monotonic() > self.until):
                break
            good, run = self._train(frozenset(), self._good, number), self._train(chosen, variant, number)
            if good.error is not None:
                raise GoodFails(good.error)
            if run.error is not None:
                return Measured(pairs=number + 1, problem=run.error, diverged=run.error.startswith("diverged"))
            differences.append(run.figures[self.unit] - good.figures[self.unit])
        return Measured(mean(differences) if differences else UNKNOWN, len(differences))

    def failure(self, chosen: Subset, variant: ArmSpec) -> str | None:
        return self._train(chosen, variant, 0).error

    def _train(self, chosen: Subset, variant: ArmSpec, number: int) -> TrainedRun:
        """Train with a seed, once."""
        if (chosen, number) not in self._trained:
            first = baseline_job([self._good])
            seed = first.run.runtime.seed + number
            with Steps() as progress, trainings("bisect", first, progress=progress) as train:
                found = self._trained[chosen, number] = quality.trained_run(train(variant, seed), seed)
            if found.error is None and self.unit not in found.figures:
                found.error = f"failed: it evaluates no {self.unit}"
        return self._trained[chosen, number]


def numbers(chosen: Iterable[int]) -> str:
    """The numbers of changes, counted from 1, as ranges: 1–3, 5."""
    ranges: list[list[int]] = []
    for number in sorted(chosen):
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] = number + 1
        else:
            ranges.append([number + 1, number + 1])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in ranges)

"""The search for those changes from GOOD to BAD that make the difference: prefix halving on measured effects.

Subsets of the changes are put on top of GOOD, and each has an effect with an interval. A binary search over the first changes
follows the larger part of the effect: the first half of them, then the first quarter or three quarters, and so on, until one
change is left whose addition makes the larger step. If it makes that step alone, it is a cause. Else it needs partners: the same
search, with this change always there, finds them among those before it. Then BAD is measured without the cause, and what
remains is searched in the same way, so causes that add up are all named.

A single cause among n changes takes at most 3 + log2 n comparisons. A subset that cannot run counts as not bad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from drivetrain.measure.intervals import Interval

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


class Measurer(Protocol):
    """Measures subsets. One that has been measured already goes on with the pairs that it has."""

    @property
    def margin(self) -> float:
        """The largest effect that does not matter."""

    def measure(self, chosen: Subset, decided: Decided) -> Measured:
        """Measure until the interval decides the question or the budget is used."""


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

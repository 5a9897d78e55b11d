"""Which of the changes from GOOD to BAD make the difference: delta debugging with measured effects.

As in Zeller & Hildebrandt (2002), subsets of the changes are put on top of GOOD, and each is asked whether it is like GOOD
or like BAD. Here the answer is an effect with an interval, and a binary search follows the larger part of it: over the
first changes, then over the first half or three quarters of them, and so on, until one change is left whose addition makes
the larger step. If that change alone has the effect, it is the cause. Else it needs partners: the same search finds them
among the changes before it. Then BAD is measured without the cause, and what remains is searched in the same way.

A single cause among n changes takes at most 3 + log2 n comparisons. A subset that cannot run counts as not bad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from drivetrain.measure.intervals import Interval

NAMED, NONE, UNRESOLVED = "named", "none", "not resolved"
FAILS = "fails"  # BAD has no figure: it can be searched by which subsets fail
LARGEST = 4  # changes that a cause may consist of: a difference that needs more is spread over all of them
REST = 4  # what remains without the causes is searched too if it is more than a quarter of the whole difference

Subset = frozenset[int]  # of the changes, by their numbers


@dataclass
class Measured:
    """What was found for GOOD with a subset of the changes."""

    effect: Interval | None = None  # its difference from GOOD: 0 is none; None where it has no figure
    pairs: int = 0  # rounds or seeds that were measured
    problem: str = ""  # why it has no figure
    diverged: bool = False  # it has none because its training failed to converge, which counts as bad


class Measurer(Protocol):
    """Measures subsets. One that has been measured already goes on with the pairs that it has."""

    @property
    def margin(self) -> float:
        """The largest effect that does not matter."""

    def measure(self, chosen: Subset, decided: Callable[[Interval], bool]) -> Measured:
        """Measure until the interval decides the question or the budget is used."""


class Between(NamedTuple):
    """The question whether an effect is nearer to `high` than to `low`."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The effect that is as near to one as to the other."""
        return (self.low + self.high) / 2

    def excludes_middle(self, found: Interval) -> bool:
        """Whether the interval lies on one side of the middle."""
        return not found.low <= self.middle <= found.high

    def decided(self, found: Interval) -> bool:
        """Whether the interval is narrow enough, and lies on one side; a very narrow one near the middle may go either way."""
        step, width = abs(self.high - self.low), found.high - found.low
        return (width <= step and self.excludes_middle(found)) or width <= step / 2

    def is_high(self, found: Interval) -> bool:
        """The answer, by the estimate."""
        return (found.middle - self.middle) * (self.high - self.low) > 0


@dataclass
class Cause:
    """A smallest set of changes that makes a difference, and its effect; None where it makes training diverge."""

    changes: tuple[int, ...]
    effect: Interval | None


@dataclass
class Answer:
    """What the search came to."""

    outcome: str
    whole: Measured  # BAD
    causes: list[Cause] = field(default_factory=list)
    rest: Measured | None = None  # BAD without the causes
    suspects: tuple[int, ...] = ()  # where the search stopped: a cause is among these
    reason: str = ""  # why it stopped


class Unresolved(Exception):
    """The budget is used before a question is decided; the message says which."""


@dataclass
class Search:
    """A search among changes with the numbers 0 to n - 1, in an order in which every first few of them can run."""

    n: int
    measurer: Measurer
    tried: dict[Subset, Measured] = field(default_factory=dict)
    _suspects: tuple[int, ...] = ()

    def run(self) -> Answer:
        """Search until the difference is explained, or the budget is used."""
        whole = self._measure(frozenset(range(self.n)), self._whole_is_decided)
        effect = whole.effect
        if effect is None:
            return Answer(FAILS, whole)
        if self._is_small(effect):
            return Answer(NONE, whole)
        if effect.low <= 0 <= effect.high:
            reason = "whether they differ is not certain"
            return Answer(UNRESOLVED, whole, suspects=tuple(range(self.n)), reason=reason)
        answer = Answer(NAMED, whole)
        try:
            self._explain(answer, effect.middle)
        except Unresolved as stopped:
            answer.suspects, answer.reason = self._suspects, str(stopped)
            answer.outcome = NAMED if answer.causes else UNRESOLVED
        return answer

    @property
    def comparisons(self) -> int:
        """How many subsets were measured, BAD included."""
        return sum(found.pairs > 0 for found in self.tried.values())

    def _explain(self, answer: Answer, whole: float) -> None:
        """Find causes until BAD without them is nearly as GOOD."""
        left, target = list(range(self.n)), whole
        while True:
            cause = self._cause(left, target)
            answer.causes.append(cause)
            left = [change for change in left if change not in cause.changes]
            self._suspects = tuple(left)
            if not left:
                return
            question = Between(0.0, 2 * whole / REST)
            answer.rest = self._measure(frozenset(left), question.decided)
            if not self._answer(answer.rest, question):
                return
            target = answer.rest.effect.middle if answer.rest.effect is not None else target

    def _cause(self, items: Sequence[int], target: float) -> Cause:
        """A smallest set of `items` that has an effect near to that of all of them, which is `target`."""
        cause: Subset = frozenset()
        low, high = 0.0, target
        while True:
            first, high = self._smallest_prefix(cause, items, low, high)
            cause |= {items[first - 1]}
            items = items[: first - 1]
            if not items:
                break
            question = Between(0.0, high)
            alone = self._measure(cause, question.decided)
            if self._answer(alone, question):
                break
            if len(cause) == LARGEST:
                self._suspects = tuple(sorted(cause.union(items)))
                raise Unresolved(f"no {LARGEST} changes make most of the difference: it is spread over many")
            low = alone.effect.middle if alone.effect is not None else 0.0
        return self._minimal(cause)

    def _smallest_prefix(self, fixed: Subset, items: Sequence[int], low: float, high: float) -> tuple[int, float]:
        """How many of the first `items` it takes, with `fixed`, for the larger part of the step from `low` to `high`.

        `low` is the effect of `fixed`, and `high` that with all items. Returns the number and the effect.
        """
        good, bad = 0, len(items)
        while bad - good > 1:
            self._suspects = tuple(sorted(fixed.union(items[good:bad])))
            half, question = (good + bad) // 2, Between(low, high)
            found = self._measure(fixed.union(items[:half]), question.decided)
            if self._answer(found, question):
                bad, high = half, found.effect.middle if found.effect is not None else high
            else:
                good, low = half, found.effect.middle if found.effect is not None else low
        return bad, high

    def _minimal(self, cause: Subset) -> Cause:
        """The cause without the changes that it does not need."""
        for change in sorted(cause):
            effect, smaller = self.tried[cause].effect, cause - {change}
            if smaller and effect is not None:
                question = Between(0.0, effect.middle)
                if self._answer(self._measure(smaller, question.decided), question):
                    cause = smaller
        return Cause(tuple(sorted(cause)), self.tried[cause].effect)

    def _measure(self, chosen: Subset, decided: Callable[[Interval], bool]) -> Measured:
        found = self.tried[chosen] = self.measurer.measure(chosen, decided)
        return found

    def _answer(self, found: Measured, question: Between) -> bool:
        """Whether the effect is nearer to the question's `high`. Raises Unresolved where that is not known."""
        if found.effect is None:
            return found.diverged
        if not question.decided(found.effect) and not question.excludes_middle(found.effect):
            raise Unresolved("the noise is too large for the rounds, seeds or seconds that were allowed")
        return question.is_high(found.effect)

    def _whole_is_decided(self, found: Interval) -> bool:
        known = found.high - found.low <= abs(found.middle) and not found.low <= 0 <= found.high
        return known or self._is_small(found)

    def _is_small(self, found: Interval) -> bool:
        return max(abs(found.low), abs(found.high)) < self.measurer.margin

"""A forecast figure: the most likely value, and the interval in which it is expected to lie."""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """A value with its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Figure:
        """A value that is counted."""
        return cls(value, value, value)

    @classmethod
    def within(cls, value: float, low: float, high: float) -> Figure:
        """A value with an interval that is given by factors of it."""
        return cls(value, value * low, value * high)

    def __add__(self, other: Figure) -> Figure:  # type: ignore[override]
        """The sum, with the sum of the intervals: the parts may be wrong together."""
        return Figure(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Figure:
        """The figure so many times."""
        return Figure(*(factor * each for each in self))

    def holds(self, value: float) -> bool:
        """Whether a value lies in the interval."""
        return self.low <= value <= self.high

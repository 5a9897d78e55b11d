"""Confidence intervals from few paired measurements, with as few assumptions about the noise as possible."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

EQUIVALENCE = 0.02  # a ratio within this distance of 1 counts as no difference
MIN_PAIRS = 6  # least number for a 95 % interval


class Interval(NamedTuple):
    """An estimate and its confidence interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        """The ratio in words; without bounds where there are too few pairs for them."""
        return f"{self.middle:.2f} ×{self.bounds}"

    def as_fast(self, base: str = "") -> str:
        """The speed relative to `base`, in words."""
        return f"{self.middle:.2f} × as fast{base and f' as {base}'}{self.bounds}"

    @property
    def bounds(self) -> str:
        """The interval in words; "" where there is none."""
        return f" ({self.low:.2f} to {self.high:.2f})" if self.low else ""

    @property
    def differs(self) -> bool:
        """True if a ratio's interval excludes 1."""
        return self.low > 1 or self.high < 1

    @property
    def same(self) -> bool:
        """True if a ratio's interval is so close to 1 that any difference is too small to matter."""
        return self.low > 1 - EQUIVALENCE and self.high < 1 + EQUIVALENCE


def middle(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The Hodges–Lehmann estimate of the values' middle, with Wilcoxon's signed-rank interval.

    The interval is exact for any symmetric noise and robust against outliers (Hodges & Lehmann 1963). With fewer than
    6 values there is no 95 % interval: it is infinite.
    """
    n = len(values)
    walsh_averages = sorted((values[i] + values[j]) / 2 for i in range(n) for j in range(i, n))
    found, cut = statistics.median(walsh_averages), _wilcoxon_cut(n, (1 - confidence) / 2)
    if cut is None:
        return Interval(found, -math.inf, math.inf)
    return Interval(found, walsh_averages[cut], walsh_averages[len(walsh_averages) - 1 - cut])


def ratio(values: Sequence[float], base: Sequence[float], confidence: float = 0.95) -> Interval:
    """The ratio values / base of pairs: the `middle` of its logarithms. Without an interval it is from 0 to infinity."""
    logs = [math.log(v / b) for v, b in zip(values, base, strict=True)]
    return Interval(*map(math.exp, middle(logs, confidence)))


def mean(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The mean and its two-sided Student's t interval."""
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    n = len(values)
    middle = sum(values) / n
    if n < 2:
        return Interval(middle, -math.inf, math.inf)
    half_width = float(stdtrit(n - 1, 1 - (1 - confidence) / 2)) * deviation(values) / math.sqrt(n)
    return Interval(middle, middle - half_width, middle + half_width)


def around(middle: float, looks: Sequence[float]) -> Interval:
    """A share, and its 95 % interval by the spread of what several looks saw of it; without these it has no width."""
    if not looks:
        return Interval(middle, middle, middle)
    spread = mean(looks)
    return Interval(middle, max(0.0, middle + spread.low - spread.middle), min(1.0, middle + spread.high - spread.middle))


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation; nan where a value is not finite (statistics.stdev raises there)."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _wilcoxon_cut(n: int, tail: float) -> int | None:
    """The number of Walsh averages outside the interval on each side: the largest k with P(signed-rank sum < k) ≤ tail."""
    import numpy as np

    ways = np.ones(1)  # to reach each signed-rank sum with the ranks so far
    for rank in range(1, n + 1):
        ways = np.append(ways, np.zeros(rank)) + np.append(np.zeros(rank), ways)
    k = int(np.searchsorted(np.cumsum(ways), tail * 2**n, side="right"))
    return k - 1 if k else None

"""Intervals of few paired figures, without assuming how noise is distributed more than it must be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

TINY = 0.02  # of a ratio
FEWEST = 6  # pairs that an interval of 95 % needs


class Interval(NamedTuple):
    """An estimate and the interval that holds the truth with the stated confidence."""

    middle: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Of a ratio: whether 1 lies outside."""
        return self.low > 1 or self.high < 1

    @property
    def same(self) -> bool:
        """Of a ratio: whether what difference there may be is too small to matter."""
        return self.low > 1 - TINY and self.high < 1 + TINY


def ratio(values: Sequence[float], base: Sequence[float], confidence: float = 0.95) -> Interval:
    """values / base, pair by pair: the Hodges–Lehmann estimate of the logarithms and Wilcoxon's signed-rank interval.

    Exact for any symmetric noise, and unmoved by a few wild turns (Hodges & Lehmann 1963). Below 6 pairs there is no
    such interval of 95 %: it is infinite.
    """
    logs = [math.log(v / b) for v, b in zip(values, base, strict=True)]
    n = len(logs)
    walsh = sorted((logs[i] + logs[j]) / 2 for i in range(n) for j in range(i, n))
    cut = _wilcoxon_cut(n, (1 - confidence) / 2)
    middle = math.exp(_median(walsh))
    if cut is None:
        return Interval(middle, 0.0, math.inf)
    return Interval(middle, math.exp(walsh[cut]), math.exp(walsh[len(walsh) - 1 - cut]))


def mean(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The mean and Student's interval, two-sided."""
    from scipy.stats import t

    n = len(values)
    middle = sum(values) / n
    if n < 2:
        return Interval(middle, -math.inf, math.inf)
    half = float(t.ppf(1 - (1 - confidence) / 2, n - 1)) * deviation(values) / math.sqrt(n)
    return Interval(middle, middle - half, middle + half)


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of the population that the values are a sample of."""
    middle = sum(values) / len(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1))


def _median(ordered: Sequence[float]) -> float:
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def _wilcoxon_cut(n: int, tail: float) -> int | None:
    """How many of the Walsh averages lie outside on each side: the largest k with P(signed-rank sum < k) ≤ tail."""
    counts = [1]  # ways to reach each signed-rank sum with the ranks so far
    for rank in range(1, n + 1):
        longer = counts + [0] * rank
        for total, ways in enumerate(counts):
            longer[total + rank] += ways
        counts = longer
    below, k = 0, 0
    while below + counts[k] <= tail * 2**n:
        below += counts[k]
        k += 1
    return k - 1 if k else None

"""Intervals: that they are the exact ones, hold what they promise, and see what is there."""

import itertools
import math
import random

import pytest

from drivetrain.measure import intervals
from drivetrain.measure.intervals import mean, ratio


def test_the_signed_rank_cut_is_the_one_of_the_tables():
    """Two-sided 5 % critical values (Wilcoxon 1945)."""
    table = {5: None, 6: 0, 7: 2, 8: 3, 9: 5, 10: 8, 12: 13, 15: 25, 20: 52}
    assert {n: intervals._wilcoxon_cut(n, 0.025) for n in table} == table


def test_the_cut_is_what_counting_all_signs_gives():
    n, tail = 8, 0.025
    sums = [sum(r for r, s in zip(range(1, n + 1), signs, strict=True) if s) for signs in itertools.product((0, 1), repeat=n)]
    share = [sum(s <= k for s in sums) / 2**n for k in range(10)]
    assert intervals._wilcoxon_cut(n, tail) == max(k for k, p in enumerate(share) if p <= tail)


def repeated(rng, shift, rounds=12, noise=0.02, times=1000):
    drift = [math.exp(rng.gauss(0, 0.3)) for _ in range(rounds)]  # shared by a round's turns

    def arm(factor):
        return [factor * d * math.exp(rng.gauss(0, noise)) for d in drift]

    return [ratio(arm(1 + shift), arm(1)) for _ in range(times)]


def test_equal_arms_are_called_different_at_most_once_in_twenty():
    found = repeated(random.Random(0), 0.0)
    assert sum(i.differs for i in found) <= 0.06 * len(found)


def test_five_percent_are_seen_and_three_mostly():
    assert sum(i.high < 1 for i in repeated(random.Random(1), -0.05)) >= 990
    assert sum(i.high < 1 for i in repeated(random.Random(2), -0.03)) >= 800


def test_a_wild_turn_does_not_move_it():
    base, arm = [100.0] * 12, [110.0] * 11 + [3.0]
    assert ratio(arm, base).middle == pytest.approx(1.1)


def test_too_few_rounds_say_nothing():
    assert not ratio([2.0] * 5, [1.0] * 5).differs
    assert ratio([2.0] * 6, [1.0] * 6).differs


def test_the_mean_has_students_interval():
    found = mean([1.0, 2.0, 3.0, 4.0])
    assert found.middle == 2.5
    assert found.high - found.middle == pytest.approx(3.182 * 1.29099 / 2, rel=1e-3)
    assert mean([1.0]).high == math.inf

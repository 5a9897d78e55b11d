"""When an arm needs no further rounds, and what its figures are compared with: on made-up rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.measure.benchmark import stopping
from drivetrain.measure.benchmark.arms import ArmSpec
from drivetrain.measure.benchmark.row import Row


def arm(*rates: float, seconds: float = 1.0, wait: float = 0.0, **facts: Any) -> Any:
    blocks = [SimpleNamespace(rate=r, step_s=[0.1], data_wait_s=wait, seconds=seconds, peak_memory=1) for r in rates]
    return SimpleNamespace(blocks=blocks, facts=facts, error=None, stopped_after=None, starts=[], job=None)


def row(made: Any, base: Any) -> Row:
    return Row.of(ArmSpec("arm", [], None, []), made, base)


def test_an_arm_stops_when_its_ratio_is_known_to_two_per_cent():
    base, near = [100.0 + n % 2 for n in range(8)], [200.0 + n % 3 / 2 for n in range(8)]
    wide = [200.0, 210.0, 190.0, 205.0, 195.0, 220.0, 185.0, 200.0]
    arms = [arm(*base), arm(*near), arm(*wide)]
    assert list(stopping.precise(arms, 8)) == [arms[1]]
    assert list(stopping.precise(arms, stopping.MIN_ROUNDS - 1)) == []  # narrow by chance


@pytest.mark.parametrize(("slower", "rounds", "dropped"), [(2, 2, True), (1, 2, False), (2, 3, False), (3, 4, True)])
def test_an_arm_is_dropped_where_it_lost_clearly_more_than_half(slower, rounds, dropped):
    made = arm(*[90.0] * slower, *[110.0] * (rounds - slower))
    base = arm(*[100.0] * rounds)
    assert (list(stopping.no_gain([base, made], rounds)) == [made]) is dropped
    assert (list(stopping.behind([base, made], rounds)) == [made]) is dropped


def test_the_baseline_is_never_dropped_and_what_is_near_the_best_stays():
    base, best, near, far = (arm(*[rate] * 4) for rate in (100.0, 200.0, 198.0, 150.0))
    assert list(stopping.behind([base, best, near, far], 4)) == [far]


def test_an_arm_that_stopped_is_compared_with_its_own_rounds():
    """The machine became twice as slow after the arm had stopped: that changes no ratio."""
    base, stopped = arm(*[100.0] * 6, *[50.0] * 6), arm(*[200.0] * 6)
    assert row(stopped, base).ratio.middle == pytest.approx(2.0)


def test_the_share_of_waiting_is_that_of_the_whole_time():
    made = arm(1.0, 1.0, seconds=4.0, wait=1.0)
    assert row(made, made).data_wait == 0.25

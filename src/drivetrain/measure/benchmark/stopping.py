"""Stopping rules: which arms of an interleaved benchmark need no further rounds.

An arm is behind or ahead by the time of the whole run, its start included, where the run's length is known.
A comparison whose interval is to be trusted never stops because one arm is ahead: it stops on the interval's width alone.
A search may drop arms that are behind, because that makes no other arm a winner: those that stay are judged by all rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from math import log

from drivetrain.measure.benchmark import whole_run
from drivetrain.measure.benchmark.interleave import Arm
from drivetrain.measure.intervals import ratio

WIDTH = 0.02  # of a ratio to each side: precise enough
MIN_ROUNDS = 8  # with fewer rounds an interval may be narrow by chance
NEAR_BEST = 0.97  # of the best arm's rate: an arm that is nearer may yet be the best


def precise(arms: Sequence[Arm], rounds: int) -> Iterator[Arm]:
    """The arms whose ratio to the first arm is known to 2 %."""
    if rounds >= MIN_ROUNDS:
        base = [block.rate for block in arms[0].blocks]
        for arm in arms[1:]:
            found = ratio([block.rate for block in arm.blocks], base)
            if found.high < found.low * (1 + WIDTH) ** 2:
                yield arm


def no_gain(arms: Sequence[Arm], rounds: int) -> Iterator[Arm]:
    """The arms that are slower than the first one in clearly more than half of the rounds."""
    yield from (arm for arm in arms[1:] if _is_slower(arm, arms[0], 1.0))


def behind(arms: Sequence[Arm], rounds: int) -> Iterator[Arm]:
    """The arms without gain, and those that are clearly slower than the best one so far."""
    best = max(arms, key=lambda arm: _mean_log_ratio(arm, arms[0]))
    yield from (arm for arm in arms[1:] if _is_slower(arm, arms[0], 1.0) or _is_slower(arm, best, NEAR_BEST))


def _is_slower(arm: Arm, other: Arm, share: float) -> bool:
    """Whether the arm had less than `share` of the other's speed in at least one round more than half: 2 of 2, 3 of 4, 4 of 6."""
    pairs = list(zip(*whole_run.speeds(arm, other), strict=True))
    slower = sum(mine < share * theirs for mine, theirs in pairs)
    return slower >= len(pairs) / 2 + 1


def _mean_log_ratio(arm: Arm, base: Arm) -> float:
    """The mean logarithm of the arm's speed to that of `base`, as ratios are estimated from logarithms."""
    return statistics.fmean(log(mine / theirs) for mine, theirs in zip(*whole_run.speeds(arm, base), strict=True))

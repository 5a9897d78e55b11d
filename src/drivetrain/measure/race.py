"""A comparison that looks for winners: arms that will not be among them take no further rounds.

Giving an arm up makes no other one a winner: who stays is judged by all rounds, against a first arm that ran all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from drivetrain.measure.turns import Arm

CLOSE = 0.97  # of the best arm's rate: nearer than that it may yet be the best


def no_gain(arms: Sequence[Arm], rounds: int) -> Iterator[Arm]:
    """Those that the first arm beat in clearly more than half of the rounds."""
    yield from (arm for arm in arms[1:] if _beaten(arm, arms[0], 1.0))


def behind(arms: Sequence[Arm], rounds: int) -> Iterator[Arm]:
    """Those without gain, and those that the best one so far beat clearly."""
    best = max(arms, key=_speed)
    yield from (arm for arm in arms[1:] if _beaten(arm, arms[0], 1.0) or _beaten(arm, best, CLOSE))


def _beaten(arm: Arm, other: Arm, share: float) -> bool:
    """Whether it had less than this share of the other's rate in at least one round more than half: 2 of 2, 3 of 4, 4 of 6."""
    rounds = list(zip(arm.turns, other.turns, strict=True))
    lost = sum(mine.rate < share * theirs.rate for mine, theirs in rounds)
    return lost >= len(rounds) / 2 + 1


def _speed(arm: Arm) -> float:
    """The mean logarithm of its rates: what ratios are taken of."""
    return sum(math.log(turn.rate) for turn in arm.turns) / len(arm.turns)

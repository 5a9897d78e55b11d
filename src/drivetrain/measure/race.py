"""A comparison that looks for winners: arms that will not be among them take no further rounds.

Giving an arm up makes no other one a winner: who stays is judged by all rounds, against a first arm that ran all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from drivetrain.measure.turns import Arm

FIRST_LOOK = 2  # rounds before anyone is given up


def no_gain(arms: Sequence[Arm], rounds: int) -> Iterator[Arm]:
    """Those that are not ahead of the first arm, over their rounds together."""
    if rounds >= FIRST_LOOK:
        yield from (arm for arm in arms[1:] if _speed(arm) <= _speed(arms[0]))


def behind(arms: Sequence[Arm], rounds: int) -> Iterator[Arm]:
    """Those without gain, and those so far behind the best that the rest of the rounds will hardly change it."""
    best = max((_speed(arm) for arm in arms), default=0.0)
    lost = set(map(id, no_gain(arms, rounds)))
    for arm in arms[1:]:
        if id(arm) in lost or _speed(arm) < best - 0.2 / rounds:  # as logarithms: 18 % after one round, 5 % after four
            yield arm


def _speed(arm: Arm) -> float:
    """The mean logarithm of its rates: what ratios are taken of."""
    return sum(math.log(turn.rate) for turn in arm.turns) / len(arm.turns)

"""Arms that need no further rounds: what they are worth is known, or that they will not be chosen.

Which rounds are the last is never decided by who is ahead in a comparison that is to be believed: an interval ends it by
its width alone. A search gives arms up, which makes no other one a winner: who stays is judged by all rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from drivetrain.measure.benchmark.interleave import Arm
from drivetrain.measure.intervals import ratio

WIDTH = 0.02  # of a ratio, to each side: known well enough
FIRST_LOOK = 8  # rounds: before them an interval may be narrow by chance
CLOSE = 0.97  # of the best arm's rate: nearer than that it may yet be the best


def precise(arms: Sequence[Arm], rounds: int) -> Iterator[Arm]:
    """Those whose ratio to the first arm is known to 2 %."""
    if rounds >= FIRST_LOOK:
        base = [turn.rate for turn in arms[0].turns]
        for arm in arms[1:]:
            found = ratio([turn.rate for turn in arm.turns], base)
            if found.high < found.low * (1 + WIDTH) ** 2:
                yield arm


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

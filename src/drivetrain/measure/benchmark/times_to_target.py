"""When the seeds of several arms reached a target, and which arm is there soonest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from drivetrain.measure.intervals import Interval, ratio

MIN_SEEDS = 3  # for a verdict


@dataclass
class TimesToTarget:
    """When the seeds of a candidate reached the target: seconds and updates of each, None where one did not."""

    label: str
    seconds: list[float | None] = field(default_factory=list)
    updates: list[int | None] = field(default_factory=list)

    @property
    def reached(self) -> int:
        """How many seeds reached it."""
        return self.reached_of(len(self.seconds))

    def reached_of(self, seeds: int) -> int:
        """How many of the first `seeds` reached it."""
        return sum(value is not None for value in self.seconds[:seeds])

    @property
    def median(self) -> float:
        """The median of the seconds; a seed that did not reach the target counts as endlessly long."""
        values = [math.inf if value is None else value for value in self.seconds]
        return statistics.median(values) if values else math.inf

    def faster_than(self, base: TimesToTarget) -> Interval | None:
        """How many times as fast as another one it is, over the seeds where both reached the target; None for too few."""
        pairs = [(b, s) for b, s in zip(base.seconds, self.seconds, strict=False) if b is not None and s is not None]
        return ratio([b for b, _ in pairs], [s for _, s in pairs]) if len(pairs) >= MIN_SEEDS else None

    @property
    def when(self) -> str:
        """The median of the seconds in words."""
        return f"{self.median:.1f} s" if math.isfinite(self.median) else "not reached"


def columns(arms: Sequence[TimesToTarget], base: TimesToTarget, target: str) -> dict[str, list[str]]:
    """The columns of a table: how many seeds reached the target, when, and how much sooner than those of `base`."""
    made = [[n for n in arm.updates if n is not None] for arm in arms]
    faster = [arm.faster_than(base) if arm is not base else None for arm in arms]
    return {
        "reached": [f"{arm.reached} of {len(arm.seconds)}" for arm in arms],
        f"time to {target}": [arm.when for arm in arms],
        "updates to it": [f"{statistics.median(found):,.0f}" if found else "–" for found in made],
        "sooner": [times(found) if found else "–" for found in faster],
    }


def times(faster: Interval) -> str:
    """How many times as fast, in words; without bounds where there are too few seeds for them."""
    return f"{faster.middle:.2f} ×" + (f" ({faster.low:.2f} to {faster.high:.2f})" if faster.low else "")


def ranked(arms: Sequence[TimesToTarget]) -> list[TimesToTarget]:
    """The arms, the soonest first: more seeds that reached the target, then less time. None is left out."""
    return sorted(arms, key=lambda arm: (-arm.reached / max(1, len(arm.seconds)), arm.median))


def proven(arms: Sequence[TimesToTarget]) -> TimesToTarget | None:
    """The soonest arm, where it is sooner than the first one beyond doubt and no seed of it is lost; None: nothing is kept."""
    base, best = arms[0], ranked(arms)[0]
    faster = best.faster_than(base) if best is not base and best.reached >= base.reached_of(len(best.seconds)) else None
    return best if faster is not None and faster.low > 1 else None

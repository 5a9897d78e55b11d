"""`drivetrain tune target=…`: which global batch reaches a target soonest, by trainings with several seeds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.core.option import RunSpec
from drivetrain.measure.intervals import Interval, ratio

NEAR = (0.5, 1.0, 2.0)  # of the noise scale: the batches that are tried
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
        return sum(value is not None for value in self.seconds)

    @property
    def median(self) -> float:
        """The median of the seconds; a seed that did not reach the target counts as endlessly long."""
        values = [math.inf if value is None else value for value in self.seconds]
        return statistics.median(values) if values else math.inf

    def faster_than(self, base: TimesToTarget) -> Interval | None:
        """How many times as fast as another one it is, over the seeds where both reached the target; None for too few."""
        pairs = [(b, s) for b, s in zip(base.seconds, self.seconds, strict=False) if b is not None and s is not None]
        return ratio([b for b, _ in pairs], [s for _, s in pairs]) if len(pairs) >= MIN_SEEDS else None

    def cells(self, base: TimesToTarget) -> list[str]:
        """The row of the table."""
        updates = [n for n in self.updates if n is not None]
        faster = self.faster_than(base) if self is not base else None
        shown = f"{faster.middle:.2f} ×" + (f" ({faster.low:.2f} to {faster.high:.2f})" if faster.low else "") if faster else "–"
        time_ = f"{self.median:.1f} s" if math.isfinite(self.median) else "not reached"
        made = f"{statistics.median(updates):,.0f}" if updates else "–"
        return [self.label, f"{self.reached} of {len(self.seconds)}", time_, made, shown]


HEADER = ["arm", "reached", "time to the target", "updates", "faster"]


def candidates(run: RunSpec, noise_scale: float | None, samples: int) -> list[str]:
    """Batches near the noise scale, as overrides, with the learning rate that follows the square root of the batch."""
    size = run.batch.size(0)
    if not noise_scale:
        return []
    parts = run.batch.accumulation_steps * run.parallel.data_ranks()
    found = []
    for share in NEAR:
        doubled = round(math.log2(noise_scale * share / parts))
        batch = int(parts * 2 ** max(0, doubled))
        rate = f"batch.lr_scaling=sqrt batch.base_batch={size}"
        word = f"batch.global_batch={batch} {rate}"
        if batch != size and 2 <= batch <= samples and word not in found:
            found.append(word)
    return found


def ranked(arms: Sequence[TimesToTarget]) -> list[TimesToTarget]:
    """The arms, the soonest first: more seeds that reached the target, then less time. None is left out."""
    return sorted(arms, key=lambda arm: (-arm.reached / max(1, len(arm.seconds)), arm.median))


def proven(arms: Sequence[TimesToTarget]) -> TimesToTarget | None:
    """The soonest arm, where it is sooner than the first one beyond doubt and no seed of it is lost; None: nothing is kept."""
    base, best = arms[0], ranked(arms)[0]
    faster = best.faster_than(base) if best is not base and best.reached >= base.reached else None
    return best if faster is not None and faster.low > 1 else None


def train_all(
    arms: Sequence[TimesToTarget], train: Callable[[int, int], tuple[float, int] | None], seeds: int, seconds: float
) -> None:
    """Train each arm with each seed, in turns whose order is reversed each time; after MIN_SEEDS only while there is time.

    `train(arm, number)` returns seconds and updates to the target, or None.
    """
    until = time.monotonic() + seconds
    for number in range(seeds):
        if number >= MIN_SEEDS and time.monotonic() > until:
            return
        order: Any = range(len(arms)) if number % 2 == 0 else reversed(range(len(arms)))
        for arm in order:
            when = train(arm, number)
            arms[arm].seconds.append(when[0] if when else None)
            arms[arm].updates.append(when[1] if when else None)

"""`drivetrain tune target=…`: which global batch reaches a target soonest, by trainings with several seeds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from drivetrain.core.option import RunSpec
from drivetrain.measure.benchmark.times_to_target import MIN_SEEDS, TimesToTarget

NEAR = (0.5, 1.0, 2.0)  # of the noise scale: the batches that are tried


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

"""What a run's time went to. Two clock reads a step, nothing that waits for the device."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Iterator
from typing import TypeVar

import drivetrain

T = TypeVar("T")


class Clock:
    """Durations of the steps and of the waits for data; evaluation, saving and logging are left out."""

    def __init__(self, warmup: int = 1) -> None:
        self.warmup = warmup  # the first steps: they start workers, compile, allocate
        self.steps = array("d")  # seconds
        self.wait = 0.0  # seconds spent waiting for data, within the steps
        self.first_wait = 0.0  # of them
        self.first_samples = 0  # trained on when they had ended
        self.to_first_step: float | None = None
        self._mark = time.perf_counter()
        self._logged = (0, 0.0, 0.0)  # steps, their seconds, wait at the last log

    def waits(self, stream: Iterator[T]) -> Iterator[T]:
        """The stream, its waits counted."""
        read = time.perf_counter
        while True:
            asked = read()
            item = next(stream, None)
            self.wait += read() - asked
            if item is None:
                return
            yield item

    def step(self) -> None:
        """A step has ended."""
        now = time.perf_counter()
        self.steps.append(now - self._mark)
        self._mark = now
        if self.to_first_step is None:
            self.to_first_step = time.time() - drivetrain.STARTED
        if len(self.steps) == self.warmup:
            self.first_wait = self.wait

    def resume(self) -> None:
        """What was done since the last step does not count as one."""
        self._mark = time.perf_counter()

    def since_last(self) -> tuple[float, float]:
        """Seconds of the steps since the last call, and the share of them spent waiting for data."""
        count, _, wait = self._logged
        seconds = sum(self.steps[count:])
        self._logged = (len(self.steps), seconds, self.wait)
        return seconds, (self.wait - wait) / seconds if seconds else 0.0

    def steady(self) -> tuple[float, float] | None:
        """Seconds of all steps after the warm-up, and the share spent waiting."""
        rest = self.steps[self.warmup :]
        if not rest:
            return None
        return sum(rest), (self.wait - self.first_wait) / sum(rest)

    def percentiles(self) -> tuple[float, float] | None:
        """The 50th and 95th percentile of the steps after the warm-up, in milliseconds."""
        rest = sorted(self.steps[self.warmup :])
        if not rest:
            return None
        return 1e3 * statistics.median(rest), 1e3 * rest[min(len(rest) - 1, int(0.95 * len(rest)))]

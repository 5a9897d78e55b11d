"""What a run's time went to. Two clock reads a step, nothing that waits for the device."""

from __future__ import annotations

import statistics
import time
from array import array
from collections import deque
from collections.abc import Iterator

from drivetrain.core import process
from drivetrain.core.microbatch import MicroBatch


class StepTimer:
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
        self.reading = Reading()

    def waits(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The stream, its waits counted."""
        read = time.perf_counter
        while True:
            asked = read()
            item = next(stream, None)
            self.wait += read() - asked
            if item is None:
                return
            self.reading.came(asked, item)
            yield item

    def step(self) -> None:
        """A step has ended."""
        now = time.perf_counter()
        self.steps.append(now - self._mark)
        self._mark = now
        if self.to_first_step is None:
            self.to_first_step = time.time() - process.started
        if len(self.steps) == self.warmup:
            self.first_wait = self.wait

    def resume(self) -> None:
        """What was done since the last step does not count as one."""
        self._mark = time.perf_counter()

    def since_last(self) -> tuple[float, dict[str, float]]:
        """Since the last call: seconds of the steps; the share of them spent waiting for data, and what `Reading` says."""
        count, _, wait = self._logged
        seconds = sum(self.steps[count:])
        self._logged = (len(self.steps), seconds, self.wait)
        return seconds, {"data_wait": (self.wait - wait) / seconds if seconds else 0.0, **self.reading.since_last()}

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


class Reading:
    """What reading took, and how many micro-batches lay ready when one was asked for: its readers need not be asked."""

    def __init__(self) -> None:
        self._asked: deque[float] = deque(maxlen=1024)  # when a micro-batch was, more of them than ever lie ready
        self._batches, self._ready, self._seconds = 0, 0, 0.0

    def came(self, asked: float, micro: MicroBatch) -> None:
        """A micro-batch that was asked for then has come. Every time one is asked for, it lay ready if it was by then."""
        if micro.seconds is None:
            return
        self._asked.append(asked)
        self._batches += 1
        self._seconds += micro.seconds
        for other in reversed(self._asked):
            if other < micro.ready:
                break
            self._ready += 1

    def since_last(self) -> dict[str, float]:
        """Since the last call: milliseconds of reading one micro-batch, and how many lay ready on average."""
        batches, ready, seconds = self._batches, self._ready, self._seconds
        self._batches, self._ready, self._seconds = 0, 0, 0.0
        return {"decode_ms": 1e3 * seconds / batches, "queue_depth": ready / batches} if batches else {}

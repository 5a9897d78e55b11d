"""Measures where a run's time goes. It reads the clock twice a step and never waits for the device."""

from __future__ import annotations

import statistics
import time
from array import array
from collections import deque
from collections.abc import Iterator

from drivetrain.core import process
from drivetrain.core.microbatch import MicroBatch


class StepTimer:
    """Records the durations of steps and of waits for data; evaluation, saving and logging are left out."""

    def __init__(self, warmup: int = 1) -> None:
        self.warmup = warmup  # first steps, which start workers, compile and allocate
        self.steps = array("d")  # seconds
        self.wait = 0.0  # seconds spent waiting for data, within the steps
        self.first_wait = 0.0  # seconds of it during the warm-up
        self.first_samples = 0  # samples trained on when the warm-up has ended
        self.to_first_step: float | None = None  # seconds from the start of the process
        self._last_end = time.perf_counter()
        self._logged = (0, 0.0, 0.0)  # steps, their seconds, wait at the last log
        self.reading = Reading()

    def waits(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the stream's micro-batches and add up the waits for them."""
        read = time.perf_counter
        while True:
            requested = read()
            item = next(stream, None)
            self.wait += read() - requested
            if item is None:
                return
            self.reading.record(requested, item)
            yield item

    def step(self) -> None:
        """Record the end of a step."""
        now = time.perf_counter()
        self.steps.append(now - self._last_end)
        self._last_end = now
        if self.to_first_step is None:
            self.to_first_step = time.time() - process.started
        if len(self.steps) == self.warmup:
            self.first_wait = self.wait

    def resume(self) -> None:
        """Start timing the next step here: the time since the last step is left out."""
        self._last_end = time.perf_counter()

    def since_last(self) -> tuple[float, dict[str, float]]:
        """Return the seconds of the steps since the last call, and figures: the share spent waiting, and those of `Reading`."""
        count, _, wait = self._logged
        seconds = sum(self.steps[count:])
        self._logged = (len(self.steps), seconds, self.wait)
        return seconds, {"data_wait": (self.wait - wait) / seconds if seconds else 0.0, **self.reading.since_last()}

    def steady(self) -> tuple[float, float] | None:
        """Return the seconds of all steps after the warm-up and the share spent waiting; None before the first of them."""
        rest = self.steps[self.warmup :]
        if not rest:
            return None
        return sum(rest), (self.wait - self.first_wait) / sum(rest)

    def percentiles(self) -> tuple[float, float] | None:
        """Return the 50th and 95th percentile of the steps after the warm-up, in milliseconds."""
        rest = sorted(self.steps[self.warmup :])
        if not rest:
            return None
        return 1e3 * statistics.median(rest), 1e3 * rest[min(len(rest) - 1, int(0.95 * len(rest)))]


class Reading:
    """Measures reading times and how many micro-batches were ready at each request.

    It uses only the times that micro-batches carry, so it needs no access to the loader's readers.
    """

    def __init__(self) -> None:
        self._requested: deque[float] = deque(maxlen=1024)  # times of requests; more of them than are ever ready at once
        self._batches, self._ready, self._seconds = 0, 0, 0.0

    def record(self, requested: float, micro: MicroBatch) -> None:
        """Count a micro-batch that was requested at time `requested`, and all requests at which it was ready already."""
        if micro.seconds is None:
            return
        self._requested.append(requested)
        self._batches += 1
        self._seconds += micro.seconds
        for time_of_request in reversed(self._requested):
            if time_of_request < micro.ready:
                break
            self._ready += 1

    def since_last(self) -> dict[str, float]:
        """Return figures since the last call: milliseconds to read a micro-batch, and how many were ready on average."""
        batches, ready, seconds = self._batches, self._ready, self._seconds
        self._batches, self._ready, self._seconds = 0, 0, 0.0
        return {"decode_ms": 1e3 * seconds / batches, "queue_depth": ready / batches} if batches else {}

"""Measures where a run's time goes. It makes three marks a step, and waits for the device only where a record is written.

A rate is samples divided by the time of training: without evaluations and checkpoints, but with records, slow steps and the time
between epochs. The times of single steps are separate figures.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections import deque
from collections.abc import Iterator

from drivetrain.core.machine import process
from drivetrain.core.machine.device import Clock, Mark
from drivetrain.core.step.microbatch import MicroBatch


class StepTimer:
    """Records the durations of steps, of waits for data, and of training.

    Both are in the device's time: a step ends with its last operation, and the device waits while the next micro-batch is missing
    or being copied. A host that waits because the device's queue is full does not wait for data.
    """

    def __init__(self, warmup: int = 1, clock: Clock | None = None) -> None:
        self.warmup = warmup  # first steps, which start workers, compile and allocate
        self.steps = array("d")  # seconds of every step, without the work of records
        self.wait = 0.0  # seconds spent waiting for data, within the steps
        self.to_first_step: float | None = None  # seconds from the start of the process
        self.reading = ReadTimes()
        self._cold = warmup  # remaining steps of the warm-up
        self._warm, self._warm_wait = array("d"), 0.0  # seconds of the steps after it, and of the waits within these
        self._samples, self._warm_from = 0, 0  # of these steps in earlier stages; samples trained on in the warm-up
        self._clock = clock or Clock()
        self._start: Mark  # of the step that is running
        self._waits: list[tuple[Mark, Mark]]  # of the step that is running
        self._unread: deque[tuple[Mark, Mark, list[tuple[Mark, Mark]], int]] = deque()  # start, end, waits, number of steps
        self._size = self._together = 0  # samples of a step; steps since the last mark
        self._logged = 0.0  # wait at the last log
        self._since = self._trained = 0.0  # seconds of training since then; in all after the warm-up
        self._lap: Mark | None = None  # the start of the time not yet counted in these; None during a pause
        self._warm_lap: Mark | None = None  # the same after the warm-up
        self.resume()

    def begin(self, trained: int, size: int) -> None:
        """Begin a run or its next stage by a warm-up, after `trained` samples, with updates of `size`."""
        self._read(len(self._unread))
        self._samples = self.samples(trained)
        self._cold, self._warm_from, self._size = self.warmup, trained + self.warmup * size, size
        self._lap = self._warm_lap = None

    def samples(self, trained: int) -> int:
        """Return the samples in the steps after the warm-up, of a run that has trained on `trained` in all."""
        return self._samples + (0 if self._cold or not self._warm else trained - self._warm_from)

    def waits(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the stream's micro-batches and mark the waits for them."""
        mark, there = self._clock.mark, False  # whether the next micro-batch is on the device, so that there is no wait
        while True:
            requested, began = time.perf_counter(), None if there else mark()
            item = next(stream, None)
            if item is None:
                return
            if began is not None:
                self._waits.append((began, mark()))
            there = item.more
            self.reading.record(requested, item)
            yield item

    def step(self, waits: bool = False) -> None:
        """Mark the end of a step. A step that is launched with later ones is timed with them; each gets an equal share."""
        self._together += 1
        if waits:
            return
        end = self._clock.mark()
        self._unread.append((self._start, end, self._waits, self._together))
        self._start, self._waits, self._together = end, [], 0
        if self._clock.passed(self._unread[0][1]):
            self._read(1)

    def rate(self, trained: int) -> float | None:
        """Return the samples a second of training after the warm-up, of a run that has trained on `trained` in all."""
        return self.samples(trained) / self._trained if self._trained else None

    def pause(self) -> None:
        """Exclude the time until `resume` from the time of training. Waits for the device."""
        self._close()
        self._lap = None

    def resume(self) -> None:
        """Start timing the next step here: the time since the last step is left out of the steps."""
        if self._lap is None:
            self._lap = self._clock.mark()
            self._warm_lap = None if self._cold else self._lap
        self._start, self._waits = self._clock.mark(), []
        if self.to_first_step is None:
            self._resumed = time.monotonic() - process.started

    def _read(self, count: int) -> None:
        """Read the durations of the oldest unread steps."""
        for _ in range(count):
            start, end, waits, count = self._unread.popleft()
            seconds, wait = self._clock.seconds(start, end) / count, self._clock.total(waits)
            self.steps.extend([seconds] * count)
            self.wait += wait
            if start is not self._warm_lap:
                self._clock.reuse(start)
            if self.to_first_step is None:
                self.to_first_step = self._resumed + seconds
            if self._cold:
                self._warm_from += max(0, count - self._cold) * self._size
                self._cold = max(0, self._cold - count)
                self._warm_lap = None if self._cold else end
            else:
                self._warm.extend([seconds] * count)
                self._warm_wait += wait

    def since_last(self) -> tuple[float, dict[str, float]]:
        """Wait for the device. Return the seconds of training since the last call, and figures: the share spent waiting, …"""
        if self._together:  # these steps are done by now
            self._together -= 1
            self.step()
        self._read(len(self._unread))
        self._close()
        (seconds, self._since), (wait, self._logged) = (self._since, 0.0), (self._logged, self.wait)
        return seconds, {"data_wait": (self.wait - wait) / seconds if seconds else 0.0, **self.reading.since_last()}

    def _close(self) -> None:
        """Count the time of training up to now."""
        if self._lap is not None:
            end = self._clock.mark()
            self._since += self._clock.seconds(self._lap, end)
            if self._warm_lap is not None:
                self._trained += self._clock.seconds(self._warm_lap, end)
                self._warm_lap = end
            self._lap = end

    def steady(self) -> tuple[float, float] | None:
        """Return the seconds of all read steps after the warm-up and the share spent waiting; None before the first of them."""
        return (seconds, self._warm_wait / seconds) if (seconds := sum(self._warm)) else None

    def percentiles(self) -> tuple[float, float] | None:
        """Return the 50th and 95th percentile of the steps after the warm-up, in milliseconds."""
        warm = sorted(self._warm)
        return (1e3 * statistics.median(warm), 1e3 * warm[min(len(warm) - 1, int(0.95 * len(warm)))]) if warm else None


class ReadTimes:
    """Measures reading times and how many micro-batches were ready at each request.

    It uses only the times that micro-batches carry, so it needs no access to the loader's readers.
    """

    def __init__(self) -> None:
        self._requested: deque[float] = deque(maxlen=1024)  # times of requests; more than are ever ready at once
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

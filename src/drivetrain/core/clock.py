"""Clocks that measure when the device does its work, without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from drivetrain.core.lazy import torch

Mark = Any  # a point in time: seconds of the host's clock, or an event in the device's queue


class Clock:
    """The host's clock: a CPU does its work when it is called, so a mark is the time at which it is made."""

    backlog = 1  # intervals that may be unread: these can be read at once

    mark: Callable[[], Mark] = staticmethod(time.perf_counter)  # marks this point in the device's work

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks. Waits until the device has passed `end`."""
        return float(end - start)

    def total(self, intervals: Sequence[tuple[Mark, Mark]]) -> float:
        """Return the seconds of these intervals together, and take their marks back. Waits as `seconds` does."""
        return float(sum([end - start for start, end in intervals]))

    def reuse(self, mark: Mark) -> None:
        """Take back a mark that is no longer needed."""


class DeviceClock(Clock):
    """Marks are events in the device's queue, which the device stamps when it gets to them.

    The host only queues work, and may be many steps ahead: its own clock would measure how fast work is queued.
    """

    backlog = 1024  # beyond this the older half is read: the device has passed it long ago, as its queue is not that long

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Event] = []

    def mark(self) -> Mark:
        event = self._free.pop() if self._free else torch.Event(self._device, enable_timing=True)
        event.record()  # into the current stream
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def total(self, intervals: Sequence[tuple[Mark, Mark]]) -> float:
        seconds = sum(self.seconds(*interval) for interval in intervals)
        self._free += [mark for interval in intervals for mark in interval]
        return seconds

    def reuse(self, mark: Mark) -> None:
        self._free.append(mark)


def clock_for(device: torch.device) -> Clock:
    """Return the device's clock. Devices that are not there, such as those of fake tensors, have no queue."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return DeviceClock(device) if accelerator is not None and device.type == accelerator.type else Clock()

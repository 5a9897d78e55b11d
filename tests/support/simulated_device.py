"""A simulated accelerator: work is queued, and the host waits for it only when it synchronises. Its clock is a number."""

from collections.abc import Iterator
from typing import Any


class Queue:
    """The device's queue, with the host's clock. `depth`: seconds of work at which a launch has to wait (back-pressure)."""

    def __init__(self, depth: float = float("inf")) -> None:
        self.now = 0.0  # the host's clock, in seconds
        self.free_at = 0.0  # when the device has done what is queued
        self.idle = 0.0  # seconds in which the device had nothing to do
        self.depth = depth
        self.events = 0  # made

    def launch(self, seconds: float, host: float = 0.0) -> None:
        """Queue work for the device, which takes the host a moment."""
        self.now += host
        self.now = max(self.now, self.free_at - self.depth)
        self.idle += max(0.0, self.now - self.free_at)
        self.free_at = max(self.now, self.free_at) + seconds

    def synchronize(self, *_: Any) -> None:
        self.now = max(self.now, self.free_at)

    def event_type(self) -> type:
        """`torch.Event` of this device."""
        queue = self

        class Event:
            def __init__(self, device: Any = None, *, enable_timing: bool = False) -> None:
                assert enable_timing
                queue.events += 1

            def record(self, stream: Any = None) -> None:
                self.at = max(queue.now, queue.free_at)

            def synchronize(self) -> None:
                queue.now = max(queue.now, self.at)

            def query(self) -> bool:
                return bool(self.at <= queue.now)

            def elapsed_time(self, end: Any) -> float:
                assert max(self.at, end.at) <= queue.now, "not ready"  # as CUDA says
                return 1e3 * (end.at - self.at)

        return Event


def reads(queue: Queue, seconds: list[float], items: list[Any]) -> Iterator[Any]:
    """A stream whose items take the host these seconds to read."""
    for each, item in zip(seconds, items, strict=True):
        queue.now += each
        yield item

"""Measures how long each rank works without waiting for others, to find the slowest one."""

from __future__ import annotations

from collections import deque
from typing import Any

from drivetrain.core.clock import Clock, Mark
from drivetrain.core.lazy import torch


class RankWork:
    """Adds up the time in those parts of the training forward in which no rank waits for another.

    It is the device's time, as the host may be far ahead of it. It leaves out the backward, in which all ranks wait, and
    compiled code, where a clock would cause graph breaks.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._seconds = 0.0
        self._since: Mark | None = None
        self._unread: deque[tuple[Mark, Mark]] = deque()

    def seconds(self) -> float:
        """Return the seconds of work so far. Waits for the device."""
        self._read(len(self._unread))
        return self._seconds

    def time_forward(self, module: torch.nn.Module) -> None:
        """Time a module's whole forward. Call it before FSDP or DDP add their hooks, so that these are not timed."""
        module.register_forward_pre_hook(self._begin, prepend=True)
        module.register_forward_hook(self._end)

    def time_between(self, first: torch.nn.Module, last: torch.nn.Module) -> None:
        """Time from the start of `first`'s forward to the start of `last`'s, which is inside of it."""
        first.register_forward_pre_hook(self._begin)
        last.register_forward_pre_hook(self._end)

    def _begin(self, module: Any, *_: Any) -> None:
        if module.training and not torch.compiler.is_compiling():
            self._since = self._clock.mark()

    def _end(self, module: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._since is not None and module.training:
            self._unread.append((self._since, self._clock.mark()))
            if len(self._unread) >= self._clock.backlog:
                self._read(max(1, self._clock.backlog // 2))
        self._since = None

    def _read(self, count: int) -> None:
        """Read the oldest unread intervals."""
        self._seconds += self._clock.total([self._unread.popleft() for _ in range(count)])

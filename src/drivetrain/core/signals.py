"""Signals that stop a run: the handler only sets a flag, and the loop saves and stops at its next update."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopFlag:
    """A context manager: the first SIGTERM, SIGINT or SIGUSR1 sets `raised` to its number; a later Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.raised, self._at = 0, 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():  # the only thread that may set handlers
            self._before = {s: signal.signal(s, self._handle) for s in STOP_SIGNALS}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.raised and time.monotonic() > self._at + 1:  # launchers send the first one twice
            raise KeyboardInterrupt
        if not self.raised:
            self.raised, self._at = number, time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


@contextmanager
def ended_by_signals() -> Iterator[Callable[[], None]]:
    """Within the context SIGTERM and SIGINT raise KeyboardInterrupt, so that every `finally` runs.

    Python drops an exception that a handler raises during a destructor or a fork hook. The context's value is a function
    that raises what was dropped: call it now and then. The end of the context calls it too.
    """
    raised = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        raised = True
        raise KeyboardInterrupt

    def raise_if_interrupted() -> None:
        if raised:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield raise_if_interrupted
        raise_if_interrupted()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

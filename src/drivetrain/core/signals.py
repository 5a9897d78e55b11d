"""Signals that ask a run to stop: the handler only sets a flag, the loop saves at its next update."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

ASKED_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopFlag:
    """Within the context, the first SIGTERM, SIGINT or SIGUSR1 sets `raised`; Ctrl-C again later interrupts at once."""

    def __init__(self) -> None:
        self.raised, self._at = 0, 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {s: signal.signal(s, self._handle) for s in ASKED_TO_STOP}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.raised and time.monotonic() > self._at + 1:  # a launcher repeats the first
            raise KeyboardInterrupt
        if not self.raised:
            self.raised, self._at = number, time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


@contextmanager
def ended_by_signals() -> Iterator[Callable[[], None]]:
    """Within the context SIGTERM and SIGINT end what is done, through every `finally`, by KeyboardInterrupt.

    Python drops an exception of a handler that ran within a destructor or a hook of fork's. So the context's value is
    called every now and then, and raises what was dropped; the context's end does too.
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

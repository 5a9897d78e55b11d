"""Signals that stop a run: the handler sets a flag, and the loop saves and stops at its next update.

A run that waits for data may never get to its next update. So the flag also says for how long it waits then.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import ClassVar

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOP_WAIT_S = 10.0  # that a run which was told to stop waits for its next batch, so that it can finish the update and save
SOON_S = 0.5  # the same between two updates, where it can save at once
NUDGE_S = 0.2  # between two looks at whether a read of the main thread's own has lasted too long
NUDGE = getattr(signal, "SIGURG", None)  # ends its system call; a process that has no handler for it ignores it


class Overdue(KeyboardInterrupt):
    """A read of the main thread's own lasts too long, in a run that was told to stop."""


class StopFlag:
    """A context manager: the first SIGTERM, SIGINT or SIGUSR1 sets `raised` to its number; a later Ctrl-C interrupts at once."""

    _of_run: ClassVar[StopFlag | None] = None  # the flag of the run that this process trains

    def __init__(self) -> None:
        self.raised, self._at = 0, 0.0
        self._patience, self._reads = STOP_WAIT_S, False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():  # the only thread that may set handlers
            self._before = {s: signal.signal(s, self._handle) for s in STOP_SIGNALS}
            if NUDGE is not None:
                self._before[NUDGE] = signal.signal(NUDGE, self._end_read)
            StopFlag._of_run = self
        return self

    @classmethod
    def waited_long_enough(cls, grace: float = 0.0) -> bool:
        """Return whether this process's run was told to stop so long ago that what it waits for is not waited for any longer."""
        flag = cls._of_run
        return flag is not None and bool(flag.raised) and time.monotonic() - flag._at > flag._patience + grace

    @classmethod
    def can_save_now(cls, can: bool) -> None:
        """Say whether this process's run could save where it is now: then it soon stops waiting once it was told to stop."""
        if cls._of_run is not None:
            cls._of_run._patience = SOON_S if can else STOP_WAIT_S

    @classmethod
    @contextmanager
    def ends_reads(cls) -> Iterator[None]:
        """Within the context the main thread reads data. Raises Overdue once it was told to stop and has waited long enough."""
        flag = cls._of_run
        if flag is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        flag._reads = True
        try:
            yield
        finally:
            flag._reads = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.raised and time.monotonic() > self._at + 1:  # launchers send the first one twice
            raise KeyboardInterrupt
        if not self.raised:
            self.raised, self._at = number, time.monotonic()
            if NUDGE is not None:
                _thread.start_new_thread(
                    self._nudge, (NUDGE,)
                )  # threading.Thread takes locks, which this thread may hold already

    def _nudge(self, number: int) -> None:
        """Have `_end_read` called in the main thread while it reads and should not any longer."""
        while StopFlag._of_run is self:
            if self._reads and self.waited_long_enough():
                signal.pthread_kill(threading.main_thread().ident or 0, number)
            time.sleep(NUDGE_S)

    def _end_read(self, number: int, frame: FrameType | None) -> None:
        if self._reads and self.waited_long_enough():
            raise Overdue

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        StopFlag._of_run = None
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


@contextmanager
def ended_by_signals() -> Iterator[Callable[[], None]]:
    """Within the context SIGTERM and SIGINT raise KeyboardInterrupt, so that every `finally` runs.

    Launchers send the first signal twice, to the process and to its group: one within a second of the first does nothing,
    because it would interrupt a `finally`.

    Python drops an exception that a handler raises during a destructor or a fork hook. The context's value is a function
    that raises what was dropped: call it now and then. The end of the context calls it too.
    """
    first: float | None = None  # when the first signal came

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is not None and time.monotonic() < first + 1:
            return
        first = first or time.monotonic()
        raise KeyboardInterrupt

    def raise_if_interrupted() -> None:
        if first is not None:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield raise_if_interrupted
        raise_if_interrupted()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

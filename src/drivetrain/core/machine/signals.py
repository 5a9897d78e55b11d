"""Signals that stop a run: the handler sets a flag, and the loop saves and stops at its next update.

A run that waits for data may never reach its next update. So the flag also bounds this wait. It bounds the wait for each batch,
because an update with many micro-batches may take long.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType, TracebackType
from typing import ClassVar

from drivetrain.core.errors import Interrupted

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOP_WAIT_S = 10.0  # the longest wait of a stopping run for its next batch, to finish the update and save
SOON_S = 0.5  # the same between two updates, where it can save at once
NUDGE_S = 0.2  # between two checks of a read in the main thread
AGAIN_S = 0.05  # until a signal that arrived at a bad moment is raised again
# Modules in which an exception would be dropped, or would leave ranks that torch has started and not yet registered.
DROPPING = ("logging", "multiprocessing.popen_fork", "torch.multiprocessing.spawn", "weakref")
NUDGE = getattr(signal, "SIGURG", None)  # ends a system call; a process without a handler ignores it


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None], to_the_end: bool = False) -> Iterator[None]:
    """Within the context the signals that stop a run call this handler. Only the main thread may use it.

    Where the process ends with the context (`to_the_end`), signals that are ignored by then stay ignored.
    """
    mine = [number for number in STOP_SIGNALS if signal.getsignal(number) is not None]  # None: set by a library in C
    before = {number: signal.signal(number, handler) for number in mine}
    try:
        yield
    finally:
        for number, former in before.items():
            if not (to_the_end and signal.getsignal(number) is signal.SIG_IGN):
                signal.signal(number, former)


class SignalForwarder(ExitStack):
    """Within the context a signal that stops a run sets `raised` to its number, and is forwarded to the running program."""

    def __init__(self) -> None:
        super().__init__()
        self.raised = 0
        self._send: Callable[[int], object] | None = None

    def __enter__(self) -> SignalForwarder:
        if threading.current_thread() is threading.main_thread():  # the only thread that may set handlers
            self.enter_context(handled_by(self._handle))
        return self

    @contextmanager
    def to(self, send: Callable[[int], object]) -> Iterator[None]:
        """Within the context signals go to `send`, also one that has already arrived."""
        self._send = send
        if self.raised:
            send(self.raised)
        try:
            yield
        finally:
            self._send = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.raised = number
        if self._send is not None:
            self._send(number)


class Overdue(KeyboardInterrupt):
    """A read in the main thread takes too long in a stopping run."""


class StopFlag:
    """A context manager: the first SIGTERM, SIGINT or SIGUSR1 sets `raised` to its number; a later Ctrl-C interrupts at once.

    After the `last` work of a process signals are ignored: its result sets the exit code.
    """

    _of_run: ClassVar[StopFlag | None] = None  # the flag of the run that this process trains

    def __init__(self, last: bool = False) -> None:
        self.raised, self._at, self._last = 0, 0.0, last
        self._patience, self._may_stop = STOP_WAIT_S, False
        self._reads_since: float | None = None  # the start of the main thread's current read
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():  # the only thread that may set handlers
            self._before = {s: signal.signal(s, self._handle) for s in STOP_SIGNALS}
            if NUDGE is not None:
                self._before[NUDGE] = signal.signal(NUDGE, self._end_read)
            StopFlag._of_run = self
            for raise_if_interrupted in _ended_by_signals:  # for a signal whose exception was caught, as imports may do
                raise_if_interrupted()
        return self

    @classmethod
    def told_to_stop(cls) -> bool:
        """Return whether this process's run has got a signal to stop."""
        return cls._of_run is not None and bool(cls._of_run.raised)

    @classmethod
    def waited_long_enough(cls, since: float, grace: float = 0.0) -> bool:
        """Return whether a stopping run must give up a wait.

        The wait began at `since`; only its time after the signal counts.
        """
        flag = cls._of_run
        return flag is not None and bool(flag.raised) and time.monotonic() - max(flag._at, since) > flag._patience + grace

    @classmethod
    def can_save_now(cls, can: bool) -> None:
        """Set whether the run could save now: if so, it stops waiting soon after a signal."""
        if cls._of_run is not None:
            cls._of_run._patience = SOON_S if can else STOP_WAIT_S

    @classmethod
    def nothing_to_save(cls) -> None:
        """Note that all of the run is saved or to be discarded: at a signal it need not reach an update."""
        cls.can_save_now(True)
        if cls._of_run is not None:
            cls._of_run._may_stop = True

    @classmethod
    def stop_here(cls, stops: Callable[[], bool]) -> None:
        """Raise Interrupted if this process's run is stopping and has `nothing_to_save`, or if `stops()` is true."""
        if (cls._of_run is not None and cls._of_run._may_stop and cls._of_run.raised) or stops():
            raise Interrupted("stopped by a signal while a data set was evaluated")

    @classmethod
    def ends_reads(cls) -> AbstractContextManager[object]:
        """Return a context, for any number of reads of data by this thread.

        In the main thread a read raises Overdue once the run is stopping and has waited long enough.
        """
        flag = cls._of_run
        return nullcontext() if flag is None or threading.current_thread() is not threading.main_thread() else _Read(flag)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.raised and time.monotonic() > self._at + 1:  # launchers send the first one twice
            raise KeyboardInterrupt
        if not self.raised:
            self.raised, self._at = number, time.monotonic()
            if NUDGE is not None:  # threading.Thread takes locks, which this thread may hold already
                _thread.start_new_thread(self._nudge, (NUDGE,))

    def _nudge(self, number: int) -> None:
        """Have `_end_read` called in the main thread while its read is overdue."""
        while StopFlag._of_run is self:
            if self._read_lasts():
                signal.pthread_kill(threading.main_thread().ident or 0, number)
            time.sleep(NUDGE_S)

    def _end_read(self, number: int, frame: FrameType | None) -> None:
        if self._read_lasts():
            raise Overdue

    def _read_lasts(self) -> bool:
        since = self._reads_since
        return since is not None and self.waited_long_enough(since)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        StopFlag._of_run = None
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._last and kind is None else handler)  # type: ignore[arg-type]


class _Read:
    """The context of a read. It is a class, because a generator takes as long as a small batch."""

    def __init__(self, flag: StopFlag) -> None:
        self._flag = flag

    def __enter__(self) -> None:
        self._flag._reads_since = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._flag._reads_since = None


# By each open `ended_by_signals` of this process: the function that raises a dropped exception.
_ended_by_signals: list[Callable[[], None]] = []


@contextmanager
def ended_by_signals(to_the_end: bool = False) -> Iterator[Callable[[], None]]:
    """Within the context the signals that stop a run raise KeyboardInterrupt, so that every `finally` runs.

    Launchers send the first signal twice, to the process and to its group. A signal within a second of the first does nothing,
    because it would interrupt a `finally`. Python might still drop the exception, so the context's value is a function that
    raises it: call it now and then. The end of the context calls it too, also after an error, because an interrupted import turns
    the exception into one.

    Only the main thread may set handlers: another one leaves them unchanged.
    """
    first: float | None = None  # the time of the first signal
    dropped, here = False, os.getpid()  # whether one arrived where Python drops exceptions, and has not been raised again

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal first, dropped
        dropped = comes_again(number, frame, here, lambda: dropped)
        if dropped or (first is not None and time.monotonic() < first + 1):
            return
        first = first or time.monotonic()
        raise KeyboardInterrupt

    def raise_if_interrupted() -> None:
        nonlocal first, dropped
        if first is None and not dropped:
            return
        first, dropped = first or time.monotonic(), False
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    with handled_by(interrupt, to_the_end) if is_main else nullcontext():
        _ended_by_signals.append(raise_if_interrupted)
        try:
            yield raise_if_interrupted
            raise_if_interrupted()
        except Exception:
            raise_if_interrupted()
            raise
        finally:
            _ended_by_signals.remove(raise_if_interrupted)
            dropped = False


def comes_again(number: int, frame: FrameType | None, here: int, wanted: Callable[[], bool] = lambda: True) -> bool:
    """In a handler: return whether its exception would be dropped here.

    If so, the signal is raised again soon, if still `wanted`. Python drops exceptions in a fork hook or a destructor, and
    logging catches them while it writes a line. An exception while torch starts ranks would make it lose the started ones.
    `here` is the id of the process that set the handler: a process just forked from it has no handler yet.
    """
    if os.getpid() == here and not _drops_exceptions(frame):
        return False
    _thread.start_new_thread(_raise_again, (number, wanted))  # threading.Thread takes locks, which this thread may hold already
    return True


def _raise_again(number: int, wanted: Callable[[], bool]) -> None:
    time.sleep(AGAIN_S)
    if wanted():
        signal.pthread_kill(threading.main_thread().ident or 0, number)  # it ends the main thread's waiting call


def _drops_exceptions(frame: FrameType | None) -> bool:
    """True if an exception raised in this frame is lost in it, or in one of its callers in this process.

    A process of multiprocessing begins with `_bootstrap`. In a forked one the frames below it are the parent's, such as the
    fork itself, and stay until the process ends.
    """
    while frame is not None:
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if (module, function) == ("multiprocessing.process", "_bootstrap"):
            return False
        if function == "__del__" or module in DROPPING:
            return True
        frame = frame.f_back
    return False

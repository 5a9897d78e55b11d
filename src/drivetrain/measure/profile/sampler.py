"""Samples a thread: a timer interrupts it at random instants, and the line that it is at then is counted."""

from __future__ import annotations

import dis
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from types import CodeType, FrameType
from typing import NamedTuple

from drivetrain.core.machine.device import Clock
from drivetrain.measure.profile.user_code import Found, find

SAMPLE_S = 0.001  # between two instants, on average


class Spent(NamedTuple):
    """Seconds of a thread."""

    busy: float = 0.0  # on a core
    waits: float = 0.0  # in which it had nothing to do
    wall: float = 0.0  # of a clock: with those in which it waited for a core that other work had

    def __add__(self, other: Spent) -> Spent:  # type: ignore[override]
        return Spent(self.busy + other.busy, self.waits + other.waits, self.wall + other.wall)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.busy - other.busy, self.waits - other.waits, self.wall - other.wall)

    @property
    def own(self) -> float:
        """All but those in which it waited for a core."""
        return self.busy + self.waits


Clocks = Callable[[], Spent]
Samples = Mapping[tuple[str, Found], Spent]


@contextmanager
def sampled(phase: Callable[[], str], root: CodeType) -> Iterator[tuple[Clocks, Samples]]:
    """Sample the calling thread's stack until the block ends. Yield a clock of the block, and the samples, which come at its end.

    The instants do not depend on what the thread does, so a line gets as many of them as its share of the time. Only Python
    code can be interrupted: the instants that fall into a call of C, such as an operation of torch, are counted when it
    returns, at the line that called it. The time of counting is taken out. Other threads, such as those of the loader and of
    an accelerator's backward, are not watched.
    """
    instants = _Instants(thread_clock(), lambda frame: (phase(), find(frame, root)))
    samples: dict[tuple[str, Found], Spent] = {}
    with _interrupted(instants):
        yield thread_clock(), samples
    samples |= instants.spent


class _Instants:
    """Counts random instants, and the seconds that they represent, by the thread's work at each."""

    def __init__(self, clock: Clocks, place: Callable[[FrameType | None], tuple[str, Found]]) -> None:
        self.spent: defaultdict[tuple[str, Found], Spent] = defaultdict(Spent)
        self._clock, self._place = clock, place
        self._draw = random.Random(0)
        self._before = clock()
        self._counting = 0.0  # seconds
        self._next = self._before.wall + self._pause()

    def _pause(self) -> float:
        return SAMPLE_S * self._draw.uniform(0.5, 1.5)  # not even: it could keep in step with the sampled code

    def count(self, frame: FrameType | None) -> float:
        """Count the instants since the last call at what `frame` does. Return the seconds until the next one."""
        now = self._clock()
        instants = 0
        while self._next <= now.wall - self._counting:
            self._next += self._pause()
            instants += 1
        since = now - self._before
        if instants and since.wall > 0:
            own = instants * SAMPLE_S * min(1.0, max(0.0, since.own / since.wall))
            busy = own * min(1.0, since.busy / since.own) if since.own > 0 else 0.0
            self.spent[self._place(frame)] += Spent(busy, own - busy)
        self._before = self._clock()
        self._counting += self._before.wall - now.wall
        return max(1e-6, self._next + self._counting - self._before.wall)


@contextmanager
def _interrupted(instants: _Instants) -> Iterator[None]:
    """Let a timer interrupt this thread at the instants."""

    ended = False

    def interrupt(_: int, frame: FrameType | None) -> None:
        pause = instants.count(_caller_if_new(frame))
        if not ended:  # the last signal may be handled after the timer was stopped
            signal.setitimer(signal.ITIMER_REAL, pause)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, SAMPLE_S)
    try:
        yield
    finally:
        ended = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        # By default the signal ends the process, and another thread may still have one to take.
        signal.signal(signal.SIGALRM, signal.SIG_IGN if before == signal.SIG_DFL else before)


def _caller_if_new(frame: FrameType | None) -> FrameType | None:
    """The frame that was interrupted. An instant in the C code that called a function is seen where the function begins."""
    while frame is not None and frame.f_lasti in _beginnings(frame.f_code):
        frame = frame.f_back
    return frame


@cache
def _beginnings(code: CodeType) -> frozenset[int]:
    return frozenset(i.offset for i in dis.get_instructions(code) if i.opname == "RESUME")


def thread_clock() -> Clocks:
    """A clock of the calling thread, which begins now. Only Linux reports its wait for a core; elsewhere that is 0."""
    queue = f"/proc/self/task/{threading.get_native_id()}/schedstat"

    def clock() -> Spent:
        queued = 0.0
        with suppress(FileNotFoundError), open(queue, "rb", buffering=0) as file:
            queued = int(file.read(128).split()[1]) / 1e9
        wall, busy = time.perf_counter(), time.thread_time()
        return Spent(busy, wall - queued - busy, wall)

    began = clock()
    return lambda: clock() - began


def own_seconds(work: Callable[[], object]) -> float:
    """The seconds that it takes, less those in which this thread waits for a core that other work has."""
    clock = thread_clock()
    work()
    return clock().own


class ThreadClock(Clock):
    """The thread's time on a core: what else a busy machine does is no operation's."""

    mark = staticmethod(time.thread_time)

"""Samples what a thread does: a timer interrupts it at random instants, and the line that it is at then is counted."""

from __future__ import annotations

import dis
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from drivetrain.core import process
from drivetrain.measure.profile.sites import Found, find

SAMPLE_S = 0.001  # between two instants, on average
LOOK_S = 0.002  # between two looks at the other threads, on average
SWITCH_S = 1e-4  # within which a thread that runs Python code lets another look at it; else that waits until torch is called


@dataclass
class Spent:
    """Seconds at one place, without those in which the thread waited for a core that other work had."""

    busy: float = 0.0  # on a core
    waits: float = 0.0  # in which it had nothing to do

    @property
    def own(self) -> float:
        """Return all of them."""
        return self.busy + self.waits


class Times(NamedTuple):
    """Clocks of a thread, in seconds."""

    wall: float
    own: float  # of the wall, less those in which the thread waited for a core that other work had
    busy: float  # the thread was on a core

    def __sub__(self, other: Times) -> Times:
        return Times(self.wall - other.wall, self.own - other.own, self.busy - other.busy)


class Sampler:
    """Samples the calling thread's stack while `watching`.

    The instants do not depend on what the thread does, so a line gets as many of them as its share of the time. Only Python
    code can be interrupted: the instants that fall into a call of C, such as an operation of torch, are counted when it
    returns, at the line that called it. The time of counting is taken out. What threads do that work for this one, such as
    those of the loader, another thread looks at: only where there are such `helpers`, as it takes turns with this one.
    """

    def __init__(self, phase: Callable[[], str], root: CodeType, helpers: bool = False) -> None:
        self.phase, self.root, self.helpers = phase, root, helpers
        self.spent: defaultdict[tuple[str, Found], Spent] = defaultdict(Spent)

    @contextmanager
    def watching(self) -> Iterator[Callable[[], float]]:
        """Sample until the block ends. Yield a clock of the thread's seconds, less those in which it waited for a core."""
        clock = thread_clock()
        began = clock()
        spent = _Instants(clock, lambda frame: (self.phase(), find(frame, self.root)))
        looks: defaultdict[tuple[str, Found], Counter[Found]] = defaultdict(Counter)
        with ExitStack() as watchers:
            watchers.enter_context(_interrupted(spent) if _can_interrupt() else _looked_at(spent.count))
            if self.helpers:
                thread = threading.get_ident()
                watchers.enter_context(_looked_at(lambda frame: self._look(frame, thread, looks)))
            yield lambda: (clock() - began).own
        for place, found in _divided(spent.spent, looks):
            self.spent[place].busy += found.busy
            self.spent[place].waits += found.waits

    def _look(self, frame: FrameType | None, thread: int, looks: dict[tuple[str, Found], Counter[Found]]) -> None:
        """Look at the threads that work for this one, where it waits for them."""
        place = phase, found = self.phase(), find(frame, self.root)
        if found.site is None and (found.in_backward or phase == "data"):
            looks[place][next(_elsewhere(thread), found)] += 1


class _Instants:
    """Counts random instants, and the seconds that they stand for, by what the thread does then."""

    def __init__(self, clock: Callable[[], Times], place: Callable[[FrameType | None], tuple[str, Found]]) -> None:
        self.spent: defaultdict[tuple[str, Found], Spent] = defaultdict(Spent)
        self._clock, self._place = clock, place
        self._draw = random.Random(0)
        self._before = clock()
        self._counting = 0.0  # seconds
        self._next = self._before.wall + self._pause()

    def _pause(self) -> float:
        return SAMPLE_S * self._draw.uniform(0.5, 1.5)  # not even: it could keep in step with what is sampled

    def count(self, frame: FrameType | None) -> float:
        """Count the instants since the last call at what `frame` does. Return the seconds until the next one."""
        now = self._clock()
        instants = 0
        while self._next <= now.wall - self._counting:
            self._next += self._pause()
            instants += 1
        since = now - self._before
        if instants and since.wall > 0:
            spent = self.spent[self._place(frame)]
            own = instants * SAMPLE_S * min(1.0, max(0.0, since.own / since.wall))
            busy = own * min(1.0, since.busy / since.own) if since.own > 0 else 0.0
            spent.busy += busy
            spent.waits += own - busy
        self._before = self._clock()
        self._counting += self._before.wall - now.wall
        return max(1e-6, self._next + self._counting - self._before.wall)


def _can_interrupt() -> bool:
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


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


@contextmanager
def _looked_at(look: Callable[[FrameType | None], object]) -> Iterator[None]:
    """Call `look` with the calling thread's frame again and again, in another thread."""
    done, thread = threading.Event(), threading.get_ident()

    def repeat() -> None:
        draw = random.Random(1)
        while not done.wait(LOOK_S * draw.uniform(0.5, 1.5)):
            look(sys._current_frames().get(thread))

    watcher = threading.Thread(target=repeat, daemon=True, name="sampler")
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        sys.setswitchinterval(before)


def _elsewhere(thread: int) -> Iterator[Found]:
    """Yield what threads do that work for this one: those of the loader, and torch's own of the backward."""
    pythons = {t.ident for t in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident == thread or (ident in pythons and not _in_loader(frame)):
            continue
        if (found := find(frame)).site is not None:
            yield found


def _in_loader(frame: FrameType | None) -> bool:
    folder = str(process.PACKAGE / "loader")
    while frame is not None:
        if frame.f_code.co_filename.startswith(folder):
            return True
        frame = frame.f_back
    return False


def _divided(
    spent: dict[tuple[str, Found], Spent], looks: dict[tuple[str, Found], Counter[Found]]
) -> Iterator[tuple[tuple[str, Found], Spent]]:
    """Divide the time in which the thread waited for others by what was seen of these."""
    for place, seconds in spent.items():
        seen = looks.get(place) or Counter({place[1]: 1})
        for found, count in seen.items():
            part = count / seen.total()
            yield (place[0], found), Spent(part * seconds.busy, part * seconds.waits)


def thread_clock() -> Callable[[], Times]:
    """Return the clocks of the calling thread. Only Linux tells how long it waited for a core: elsewhere that is in `own`."""
    statistics = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    thread = threading.get_ident()

    def busy() -> float:
        return time.thread_time() if threading.get_ident() == thread else time.process_time()

    if not statistics.exists():
        return lambda: Times(now := time.perf_counter(), now, busy())
    name = str(statistics)

    def clock() -> Times:
        file = os.open(name, os.O_RDONLY)
        try:
            queued = int(os.read(file, 128).split()[1]) / 1e9
        finally:
            os.close(file)
        now = time.perf_counter()
        return Times(now, now - queued, busy())

    return clock

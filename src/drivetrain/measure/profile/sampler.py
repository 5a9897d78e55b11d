"""A thread that looks again and again at what another thread does. Nothing is recorded where the work is, so it costs little."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from drivetrain.core import process
from drivetrain.measure.profile.sites import Found, find

SAMPLE_S = 0.001  # between two looks, on average
SWITCH_S = 1e-4  # within which a thread that runs Python code lets the sampler look; else it would look when torch is called


@dataclass
class Spent:
    """Seconds at one place, without those in which the thread waited for a core that other work had."""

    busy: float = 0.0  # on a core
    waits: float = 0.0  # in which it had nothing to do

    @property
    def own(self) -> float:
        """Return all of them."""
        return self.busy + self.waits


class Sampler:
    """Samples the calling thread's stack while `watching`.

    A look counts for the time since the last one, less what the thread waited for a core: other work on the machine, the
    sampler's among it, is no cost of a line. Where code keeps Python's lock, as a garbage collection does, the sampler waits
    for the lock, and the next look is at the line that kept it.
    """

    def __init__(self, phase: Callable[[], str], root: CodeType) -> None:
        self.phase, self.root = phase, root
        self.spent: defaultdict[tuple[str, Found], Spent] = defaultdict(Spent)

    @contextmanager
    def watching(self) -> Iterator[Callable[[], float]]:
        """Sample until the block ends. Yield a clock of the thread's seconds, less those in which it waited for a core."""
        done, thread = threading.Event(), threading.get_ident()
        sampler = threading.Thread(target=self._sample, args=(thread, done), daemon=True, name="sampler")
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        clock = thread_clock(thread)
        began = clock()
        sampler.start()
        try:
            yield lambda: clock().own - began.own
        finally:
            done.set()
            sampler.join()
            sys.setswitchinterval(before)

    def _sample(self, thread: int, done: threading.Event) -> None:
        clock, draw = thread_clock(thread), random.Random(0)
        waiting: defaultdict[tuple[str, Found], float] = defaultdict(float)
        began = before = clock()
        # Not at even intervals: these could keep in step with what is sampled.
        while not done.wait(SAMPLE_S * draw.uniform(0.5, 1.5)):
            frames = sys._current_frames()
            now = clock()
            phase = self.phase()
            found = find(frames.get(thread), self.root)
            if found.site is None and (found.in_backward or phase == "data"):
                found = next(self._elsewhere(frames, thread), found)
            self.spent[phase, found].busy += now.busy - before.busy
            if now.asleep:
                waiting[phase, found] += max(0.0, now.own - now.busy - (before.own - before.busy))
            before = now
        # A thread that is not asleep may be waiting for a core, and how long is told only later. So that is known of all looks
        # together: what it neither ran nor waited for a core, it slept, at the places where it was seen asleep.
        slept, seen = max(0.0, before.own - before.busy - (began.own - began.busy)), sum(waiting.values())
        for place, seconds in waiting.items():
            self.spent[place].waits += slept * seconds / seen if seen else 0.0

    def _elsewhere(self, frames: dict[int, FrameType], thread: int) -> Iterator[Found]:
        """Yield what threads do that work for this one: those of the loader, and torch's own of the backward."""
        pythons = {t.ident for t in threading.enumerate()}
        for ident, frame in frames.items():
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


class Times(NamedTuple):
    """Clocks of a thread, in seconds."""

    own: float  # of the wall, less those in which the thread waited for a core that other work had
    busy: float  # the thread was on a core
    asleep: bool  # now


def thread_clock(thread: int) -> Callable[[], Times]:
    """Return the clocks of a thread. Only Linux tells how long it waited for a core; elsewhere that counts as being asleep."""
    native = next((t.native_id for t in threading.enumerate() if t.ident == thread), None)
    told = Path(f"/proc/self/task/{native}")
    if (told / "schedstat").exists():
        statistics, state = str(told / "schedstat"), str(told / "stat")

        def clock() -> Times:
            busy, queued = _read(statistics).split()[:2]
            asleep = _read(state).rpartition(b")")[2].split()[0] != b"R"
            return Times(time.perf_counter() - int(queued) / 1e9, int(busy) / 1e9, asleep)

        return clock
    if not hasattr(time, "pthread_getcpuclockid"):
        return lambda: Times(time.perf_counter(), time.process_time(), asleep=True)
    cpu = time.pthread_getcpuclockid(thread)
    return lambda: Times(time.perf_counter(), time.clock_gettime(cpu), asleep=True)


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 512)
    finally:
        os.close(file)

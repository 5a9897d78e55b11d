"""Jobs on this machine, each in a process forked from this one.

Forked, and not handed to a pool such as joblib's: torch is imported once and not by each job, no job sees what another
one left behind, and one that is killed takes nothing with it. Where processes are forked there must be no thread, and
nothing of torch may have been run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any

from drivetrain.core import cpus, process
from drivetrain.core.errors import BAD_CONFIG, UserError
from drivetrain.launch import launcher
from drivetrain.parallel import cuda_devices
from drivetrain.run import directory
from drivetrain.run.result import Result
from drivetrain.sweep.grid import SweepJob
from drivetrain.sweep.store import LENGTH, Entry
from drivetrain.ui import terminal

SIGNALS = (signal.SIGTERM, signal.SIGINT)
OUTPUT = "output.txt"  # in a job's folder: what it said, where that is not shown


class Launcher:
    """Starts jobs and tells which have ended. The base knows jobs that some other process runs: it waits for those."""

    detached = False  # its jobs go on without this process

    def __init__(self, slots: int) -> None:
        self.slots = slots  # jobs at a time
        self._elsewhere: list[Entry] = []

    def attach(self, entry: Entry) -> bool:
        """Whether a job is under way already, started by a process that is gone: it is waited for, and not started again."""
        if directory.is_locked(entry.run_dir):
            self._elsewhere.append(entry)
            return True
        return False

    def start(self, entries: Sequence[Entry]) -> None:
        """Start these jobs, whose folders are ready."""
        raise NotImplementedError

    def wait(self, seconds: float, stopped: bool = False) -> list[Entry]:
        """The jobs that have ended, each with its result; after so many seconds, none. `stopped`: they were asked to."""
        ended = [e for e in self._elsewhere if not directory.is_locked(e.run_dir)]
        for entry in ended:
            self._elsewhere.remove(entry)
            entry.close(None, "the job's process is gone")
        return ended

    def signal(self, number: int) -> None:
        """Hand a signal on to the jobs."""


class Forked(Launcher):
    """One process for each job, so many at a time, that share the cores."""

    def __init__(self, slots: int = 1, quiet: bool = False, captured: bool = False) -> None:
        super().__init__(slots)
        self.quiet, self.captured = quiet, captured or slots > 1
        self._running: dict[Any, tuple[Any, Entry]] = {}  # sentinel → process, its job
        self._free = list(range(slots))  # places among those that run at a time
        self._place: dict[int, int] = {}  # a job's number → its place

    def start(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            with _blocked():  # between the fork and the moment when either side knows its part
                place = self._place[entry.number] = self._free.pop(0)
                process: Any = multiprocessing.get_context("fork").Process(target=self._child, args=(entry, place))
                process.start()
                self._running[process.sentinel] = process, entry

    def wait(self, seconds: float, stopped: bool = False) -> list[Entry]:
        ended = super().wait(seconds, stopped)
        for sentinel in connection.wait(list(self._running), 0 if ended else seconds):
            process, entry = self._running.pop(sentinel)
            process.join()
            self._free.append(self._place.pop(entry.number))
            code = process.exitcode
            how = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
            entry.close(code, f"the job's process was {how}", "interrupted" if stopped else "failed")
            ended.append(entry)
        return ended

    def signal(self, number: int) -> None:
        for job, _ in list(self._running.values()):
            os.kill(job.pid, number)

    def _child(self, entry: Entry, place: int) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        _end_with_the_parent()
        if self.slots > 1:
            os.environ[cpus.JOBS] = str(self.slots)
            os.environ |= own_device(entry, place)
        if self.captured:
            log = os.open(entry.run_dir / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(log, stream)
        code = perform(entry, self.quiet)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def own_device(entry: Entry, place: int) -> dict[str, str]:
    """The environment of a job of one device among several at a time: they go round the CUDA devices."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(n) for n in range(cuda_devices())] if visible is None else visible.split(",")
    if len(devices) < 2 or entry.job.job is None or entry.job.job.run.choices["parallel"] != "single":
        return {}
    return {"CUDA_VISIBLE_DEVICES": devices[place % len(devices)]}


def perform(entry: Entry, quiet: bool) -> int:
    """Run a job in this process, which is its own; its exit code."""
    process.restart_clock()
    try:
        job = entry.composed()
        job.attach = _tell_length
        ended = launcher.launch(job, entry.run_dir, quiet)
    except UserError as error:
        for problem in error.problems:
            terminal.say(problem)
        if not directory.is_locked(entry.run_dir):  # else it is another one's
            Result(error=str(error), overrides=entry.job.words).write(entry.run_dir)
        return BAD_CONFIG
    if ended.result.error:
        terminal.say(ended.result.error)
    return ended.code


def _tell_length(trainer: Any) -> None:
    """How many updates the run has: for the table."""
    if trainer.parallel.world.rank == 0:
        Path(trainer.run_dir, LENGTH).write_text(str(trainer.max_updates))


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Within the context signals wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_the_parent() -> None:
    """Have Linux ask this process to stop when its parent is killed: a job saves, and holds no device for nobody."""
    import ctypes

    set_death_signal = 1  # prctl(2)
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)


class Forward:
    """While a sweep runs, a signal to it goes to the jobs that run, and no further job starts."""

    def __init__(self) -> None:
        self.raised = 0
        self.launcher: Launcher | None = None

    def __enter__(self) -> Forward:
        self._before = {s: signal.signal(s, self._handle) for s in SIGNALS}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.raised = number
        if self.launcher is not None:
            self.launcher.signal(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def run_one(job: SweepJob, run_dir: Path, stop: Forward, quiet: bool) -> tuple[int, Result]:
    """Run one job in a process of its own; its exit code and result, whatever becomes of it."""
    entry = Entry(0, job, run_dir)
    if job.job is None:
        entry.refuse()
    else:
        entry.make_ready()
        stop.launcher = launcher = Forked(quiet=quiet)
        launcher.start([entry])
        while not launcher.wait(60.0, bool(stop.raised)):
            pass
        stop.launcher = None
    assert entry.result is not None
    return entry.code, entry.result

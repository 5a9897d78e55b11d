"""Forks processes in which torch can compute, even if this process has computed with several threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO, Any, TypeVar

from drivetrain.core.errors import UserError
from drivetrain.core.machine import isolation
from drivetrain.core.machine.open_files import apart_after_fork
from drivetrain.core.machine.signals import STOP_SIGNALS, handled_by

LOOK_S = 1.0  # between two checks for the parent
HARD = 2  # OpenMP's omp_pause_hard


class ForkedProcess(ForkProcess):
    """A forked process that may compute. Signals end it like any new process, and it ends with its parent."""

    def __init__(self, *given: Any, parents_end: signal.Signals = signal.SIGKILL, **named: Any) -> None:
        """`parents_end` is the signal sent to it when its parent has ended: SIGTERM if it has something to save."""
        super().__init__(*given, **named)
        self._parents_end = parents_end

    def start(self) -> None:
        """Fork. A signal during the fork is delivered when both processes have set their handlers."""
        end_openmp_threads()
        with _signals_held(), apart_after_fork(), garbage_kept() as self._collects:
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the new process has only this thread
            try:
                super().start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def run(self) -> None:
        """In the forked process: call the target."""
        disown_garbage()
        if self._collects:
            gc.enable()
        for number in STOP_SIGNALS:  # the handlers it has inherited are for the parent
            signal.signal(number, signal.SIG_DFL)
        end_with_parent(self._parents_end)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        with isolation.isolated():
            super().run()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Hold stop signals back within the context, and deliver them at its end: a signal mask applies to one thread."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread runs handlers
        yield
        return
    held: list[int] = []
    try:
        with handled_by(lambda number, _: held.append(number)):
            yield
    finally:
        for number in held:
            signal.raise_signal(number)


@contextlib.contextmanager
def garbage_kept() -> Iterator[bool]:
    """Collect no garbage within the context, in which this process forks.

    Yields whether collection was on. See `disown_garbage`.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield collects
    finally:
        if collects:
            gc.enable()


def disown_garbage() -> None:
    """In a forked process: collect only garbage made in it.

    Freeing the parent's objects could wait for ever for a thread that the fork did not copy, as with a process group of gloo.
    It would also copy the shared pages.
    """
    gc.freeze()


def parent_pid() -> int:
    """Return the id of the process that started this one, even if it has ended and another has adopted this one."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or multiprocessing.get_start_method() == "forkserver":  # then a server is the parent
        return os.getppid()
    return parent.pid


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Send this process a signal soon after its parent has ended, in any state."""
    parent = parent_pid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def end_with_run(run: int) -> None:
    """End this worker at a SIGTERM of the run's process, and soon after that process has ended.

    Slurm, systemd and containers send SIGTERM to all: the run still needs its next batch, to finish its update and save.

    torch's own worker looks for its parent later, when the parent may be gone, and only between two batches.
    """
    tells_sender = hasattr(signal, "sigtimedwait")  # not on a Mac
    while os.getppid() == run:
        if not tells_sender:
            time.sleep(LOOK_S)
        elif (came := signal.sigtimedwait({signal.SIGTERM}, LOOK_S)) is not None and came.si_pid == run:
            break
    os._exit(0)


@functools.cache
def end_with_users_parent() -> None:
    """Save and end soon after the end of the process that started this one by multiprocessing, if there is one."""
    if multiprocessing.parent_process() is not None:
        end_with_parent(signal.SIGTERM)


def end_with_input() -> None:
    """End this process when its standard input ends: a pipe, with its other end held by the parent.

    So this works even if the parent had ended before the call.
    """

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin: a process forked from this one would find its lock taken
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end with input", daemon=True).start()


def end_openmp_threads() -> None:
    """End the threads with which the calling thread computes; OpenMP starts others when it computes again.

    A fork does not copy them, so the forked process would wait for them for ever.
    """
    with contextlib.suppress(OSError):  # a system other than Linux
        mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()}
        for library in mapped:
            if Path(library).name.startswith(("libgomp", "libomp", "libiomp")):
                with contextlib.suppress(OSError, AttributeError):
                    ctypes.CDLL(library).omp_pause_resource_all(HARD)


LIMIT_S = 1800.0  # the default limit of work, in case it hangs
MOST_READ = 4096  # bytes of the end of its output

T = TypeVar("T")


def limit_memory(more: int) -> None:
    """Let this process take only this many more bytes: further ones are a MemoryError. Linux alone."""
    import resource

    with contextlib.suppress(OSError, ValueError):  # ValueError: the limit is lower already
        most = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * mmap.PAGESIZE + more
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


class NoAnswer(UserError):
    """A process has failed, died or taken too long; the message says so."""


class Died(NoAnswer):
    """A process has ended without a message, as when the system kills it for its memory."""


def answer_of(work: Callable[[Callable[[T], None]], object], failed: str, limit_s: float = LIMIT_S) -> T:
    """Fork a process that calls `work(answer)`; return the value passed to `answer`, there or in a process that it forks itself.

    Its output is not shown. Raises the UserError of the work, and NoAnswer, which begins with `failed`, for any other end.
    """
    connection, theirs = multiprocessing.Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as printed:
        process = ForkedProcess(target=_child, args=(work, failed, theirs, printed.fileno()))
        try:
            process.start()
            theirs.close()
            if not connection.poll(limit_s):
                raise NoAnswer(f"{failed}: it took longer than {limit_s:g} s and was ended")
            error, value = connection.recv()
        except EOFError:
            process.join()
            raise Died(f"{failed}: its process ended with code {process.exitcode}{_end_of(printed)}") from None
        finally:
            if process.pid is not None:
                process.kill()
                process.join()
            connection.close()
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def _end_of(printed: IO[bytes]) -> str:
    printed.seek(max(0, printed.seek(0, os.SEEK_END) - MOST_READ))
    lines = printed.read().decode(errors="replace").strip().splitlines()
    return f" ({lines[-1]})" if lines else ""


def _child(work: Callable[[Callable[[object], None]], object], failed: str, connection: Connection, printed: int) -> None:
    """The process: it sends (error, answer); one of them is None."""
    for stream in (1, 2):
        os.dup2(printed, stream)
    try:
        work(lambda value: connection.send((None, value)))
    except UserError as error:
        connection.send((error, None))
    except Exception as error:
        connection.send((NoAnswer(f"{failed}: {type(error).__name__}: {error}"), None))
    os._exit(0)

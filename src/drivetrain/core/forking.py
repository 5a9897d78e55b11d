"""Forks processes in which torch can compute, also where this process has computed with several threads before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.context import ForkProcess
from queue import SimpleQueue


class ForkedProcess(ForkProcess):
    """A forked process that may compute.

    A thread that computes keeps a team of OpenMP's threads, which a fork does not copy: the copy of it would wait for them
    for ever. So a thread that never computes forks. It is the main thread of the forked process.
    """

    def start(self) -> None:
        """Fork, and return when the process exists."""
        _forker(os.getpid()).call(super().start)


class _Forker:
    """A thread that lives as long as its process: the system tells children that their parent ended when this thread does."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="forker").start()

    def _serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the thread that asks
        while True:
            self._calls.get()()

    def call(self, function: Callable[[], object]) -> None:
        """Call the function in the thread; raise what it raises."""
        ended, errors = threading.Event(), list[BaseException]()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # a forked process starts with that of the thread that asks

        def called() -> None:
            before = signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            try:
                function()
            except BaseException as error:
                errors.append(error)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            ended.set()

        self._calls.put(called)
        try:
            ended.wait()
        finally:
            ended.wait()  # a signal's handler may have ended the first wait
        if errors:
            raise errors[0]


@lru_cache(maxsize=1)
def _forker(process: int) -> _Forker:
    """The thread of this process: a forked one has none yet."""
    return _Forker()

"""Forks processes in which torch can compute, also where this process has computed with several threads before."""

from __future__ import annotations

import threading
from multiprocessing.context import ForkProcess


class ForkedProcess(ForkProcess):
    """A forked process that may compute.

    A thread that computes keeps a team of OpenMP's threads, which a fork does not copy: the copy of it would wait for them
    for ever. So a new thread forks, which has none. It is the main thread of the forked process.
    """

    def start(self) -> None:
        """Fork, and return when the process exists."""
        errors: list[BaseException] = []

        def fork() -> None:
            try:
                super(ForkedProcess, self).start()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=fork, name="fork")
        thread.start()
        try:
            thread.join()
        finally:
            thread.join()  # a signal's handler may have ended the first wait
        if errors:
            raise errors[0]

"""Forks processes in which torch can compute, also where this process has computed with several threads before."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.context import ForkProcess
from pathlib import Path

from drivetrain.core.lazy import torch

LOOK_S = 1.0  # between two looks at whether the parent is there
HARD = 2  # OpenMP's omp_pause_hard


class ForkedProcess(ForkProcess):
    """A forked process that may compute."""

    def start(self) -> None:
        """Fork."""
        end_openmp_threads()
        super().start()


def parent_pid() -> int:
    """Return the process that started this one, also where it has ended already and another has adopted this one."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or multiprocessing.get_start_method() == "forkserver":  # then a server is the parent
        return os.getppid()
    return parent.pid


def end_with_parent() -> None:
    """End this process soon after the one that started it has ended, whatever it does then."""
    parent = parent_pid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def start_autograd_engine() -> None:
    """Run a backward, if this process has not: torch starts a thread for each device then, and a forked process cannot go on.

    Importing torch's compiler makes torch count a device that is not there. So this comes before it.
    """
    torch.autograd.backward(torch.ones((), device="cpu", requires_grad=True))


def end_openmp_threads() -> None:
    """End the threads with which the calling thread computes; OpenMP starts others when it computes again.

    A fork does not copy them, so the forked process would wait for them for ever.
    """
    with contextlib.suppress(OSError):  # another system than Linux
        mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()}
        for library in mapped:
            if Path(library).name.startswith(("libgomp", "libomp", "libiomp")):
                with contextlib.suppress(OSError, AttributeError):
                    ctypes.CDLL(library).omp_pause_resource_all(HARD)

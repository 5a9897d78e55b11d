"""This process: its start time, and the version and folder of the package it runs."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).resolve().parents[2]
started = time.monotonic()  # `time_to_first_step_s` and `wall_s` count from here; forked ranks inherit it
of_one_run = True  # this process was started for its run; a forked process also has its parent's memory
_date = time.time() - started


def restart_clock() -> None:
    """Set `started` to now, for a run that is not the process's first work."""
    global started, of_one_run
    started, of_one_run = time.monotonic(), False


def command(module: str) -> list[str]:
    """The command that runs a module in a new interpreter, which does not import from the working directory (-P)."""
    return [sys.executable, "-P", "-m", module]


def import_path() -> str:
    """PYTHONPATH of such an interpreter: it finds the same packages. An empty entry would mean the working directory."""
    return os.pathsep.join(dict.fromkeys([str(PACKAGE.parent), *filter(None, sys.path)]))


def processor_seconds() -> float:
    """The seconds of processor time that this process and its children, such as a loader's workers, have used so far."""
    total = time.process_time()
    with suppress(OSError, ValueError):  # only on Linux; a child may end meanwhile
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split():
            user, system = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
            total += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return total


def now() -> float:
    """Return the seconds since 1970, counted from the process's start, so that setting the clock causes no jump."""
    return _date + time.monotonic()

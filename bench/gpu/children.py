"""Runs one function in a forked process, with a time limit. Its outcome is plain data, whatever the function does.

The process that forks has imported torch but run nothing of it, so that a child can use CUDA and can fork ranks itself.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

POLL_S = 0.02
PR_SET_PDEATHSIG = 1  # of Linux' prctl
LAST_WORDS_S = 0.5  # for a child that is over its time to write where it stands

_to_parent: Connection | None = None  # in a child
_deadline = float("inf")  # in a child: of time.monotonic()


class Child:
    """One running function. `outcome` is asked again and again until the function has ended."""

    def __init__(
        self, run: Callable[..., dict[str, Any] | None], args: tuple[Any, ...], limit_s: float, threads: int | None = None
    ) -> None:
        context = get_context("fork")
        self._limit_s, self._began = limit_s, time.monotonic()
        self._output = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed when it has ended
        self._connection, theirs = context.Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        told = (theirs, self._output.fileno(), self._began + limit_s, threads)
        self._process = context.Process(target=_serve, args=(run, args, *told))
        self._process.start()
        theirs.close()
        self.reported: dict[str, Any] = {}  # what it has reported so far

    def outcome(self) -> dict[str, Any] | None:
        """None while it runs; then its status (ok, refused, failed or killed), its figures, and what it wrote."""
        alive = self._process.is_alive()  # asked first: what it sent before its end is in the pipe
        while (message := self._receive()) is not None:
            kind, content = message
            if kind != "report":
                return self._ended(kind, content)
            self.reported |= content
        if not alive:
            return self._ended("failed", {"error": f"the process ended with code {self._process.exitcode} and no result"})
        if time.monotonic() - self._began > self._limit_s:
            self._ask_where_it_stands()
            return self._ended("killed", {"error": f"killed after {self._limit_s:.0f} s", "limit_s": self._limit_s})
        return None

    def kill(self) -> None:
        """End the process and all that it started, stopped ones and those of other process groups too."""
        pid = self._process.pid
        started = descendants(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        for each in started:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self._process.kill()  # where it had no time to found its group
        self._process.join()

    def _ask_where_it_stands(self) -> None:
        """Let the process, and the ranks that it forked, write the lines that they are at."""
        for pid in (self._process.pid, *descendants(self._process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        time.sleep(LAST_WORDS_S)

    def _receive(self) -> Any:
        try:
            return self._connection.recv() if self._connection.poll() else None
        except EOFError:
            return None

    def _ended(self, status: str, content: dict[str, Any]) -> dict[str, Any]:
        self._process.join(5 if status in ("ok", "refused") else 0)  # its workers end with it
        self.kill()
        self._connection.close()
        self._output.seek(0)
        output = self._output.read().decode(errors="replace")
        self._output.close()
        figures = {"status": status, "seconds": round(time.monotonic() - self._began, 2), **self.reported, **content}
        return {**figures, "output": output} if status != "refused" else figures


def call(run: Callable[..., dict[str, Any] | None], *args: Any, limit_s: float = 60.0) -> dict[str, Any]:
    """The figures of a function that runs in a child. Raises RuntimeError with all that it wrote, should it not succeed."""
    child = Child(run, args, limit_s)
    try:
        while (outcome := child.outcome()) is None:
            time.sleep(POLL_S)
    except BaseException:
        child.kill()
        raise
    if outcome["status"] != "ok":
        raise RuntimeError("\n".join(str(outcome.get(key, "")) for key in ("status", "reason", "error", "output")))
    return outcome


def report(figures: dict[str, Any]) -> None:
    """In a child: hand over figures now, so that they are kept even if it is killed later."""
    if _to_parent is not None:
        _to_parent.send(("report", figures))


def left_s() -> float:
    """In a child: the seconds until it is killed."""
    return _deadline - time.monotonic()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(pid, []))
    for each in found:
        found += children.get(each, [])
    return found


def _serve(
    run: Callable[..., Any], args: tuple[Any, ...], connection: Connection, output: int, deadline: float, threads: int | None
) -> None:
    global _to_parent, _deadline
    from drivetrain.core import process
    from drivetrain.core.errors import UserError

    _to_parent, _deadline = connection, deadline
    with suppress(PermissionError):
        os.setpgid(0, 0)
    with suppress(AttributeError):  # on Linux it ends with the process that forked it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(output, number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    # Runs take SIGUSR1 for a wish to stop.
    faulthandler.register(signal.SIGUSR2, sys.stderr)  # no dump_traceback_later: its thread would be forked into ranks
    process.restart_clock()
    if threads is not None:  # of the compiler, beside other children
        import torch._inductor.config

        torch._inductor.config.compile_threads = threads
    try:
        message = "ok", run(*args) or {}
    except UserError as error:
        message = "refused", {"reason": str(error)}
    except BaseException:
        message = "failed", {"error": traceback.format_exc()}
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(message)

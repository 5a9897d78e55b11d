"""A forked process that works and answers: what it takes, changes or leaves running ends with it."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from drivetrain.core.errors import UserError
from drivetrain.core.forking import ForkedProcess

LIMIT_S = 1800.0  # of work that does not say how long it may take: one that hangs is not waited for any longer
MOST_READ = 4096  # bytes of the end of what it printed

T = TypeVar("T")


class NoAnswer(UserError):
    """A process has failed, died or taken too long; the message says so."""


class Died(NoAnswer):
    """A process has ended without a word, as one does that the system kills for its memory."""


def answer_of(work: Callable[[Callable[[T], None]], object], failed: str, limit_s: float = LIMIT_S) -> T:
    """Fork a process that calls `work(answer)`; return what is passed to `answer`, there or in a process that it forks itself.

    What it prints is not shown. Raises the UserError of the work, and NoAnswer, which begins with `failed`, for any other end.
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
                raise NoAnswer(f"{failed}: it took longer than {limit_s / 60:.0f} minutes and was ended")
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


def _end_of(printed: Any) -> str:
    printed.seek(max(0, printed.seek(0, os.SEEK_END) - MOST_READ))
    lines = printed.read().decode(errors="replace").strip().splitlines()
    return f" ({lines[-1]})" if lines else ""


def _child(work: Callable[[Callable[[object], None]], object], failed: str, connection: Connection, printed: int) -> None:
    """The process: it sends (error, answer), one of which is None."""
    for stream in (1, 2):
        os.dup2(printed, stream)
    try:
        work(lambda value: connection.send((None, value)))
    except UserError as error:
        connection.send((error, None))
    except Exception as error:
        connection.send((NoAnswer(f"{failed}: {type(error).__name__}: {error}"), None))
    os._exit(0)

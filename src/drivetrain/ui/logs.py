"""The program's messages: Python's `logging` under "drivetrain", shown on standard error and kept in log.txt.

A module logs by `logging.getLogger(__name__).info(...)`: INFO for reports of a run, WARNING for messages that the user should
see even under `--quiet`, ERROR for the end of a run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.machine import files
from drivetrain.ui.output import notices, plain

if TYPE_CHECKING:
    from rich.console import Console

ROOT = logging.getLogger("drivetrain")
FILE_FORMAT = "%(asctime)s %(levelname)s rank %(rank)d %(name)s: %(message)s"
STYLES = {logging.INFO: "dim", logging.WARNING: "yellow", logging.ERROR: "red"}  # in a terminal, above the progress line


class _Rank(logging.Filter):
    """Puts this process's rank into each record."""

    rank = 0

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        return True


class _ConsoleHandler(logging.Handler):
    """Prints one line per record: above the live progress line if one is drawn, else plainly on standard error.

    The ranks of a run may share one terminal: those other than rank 0 show only errors there, with their number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Console | None = None  # the console of a live progress line
        self.shared = True  # whether rank 0 writes to the same place

    def emit(self, record: logging.LogRecord) -> None:
        rank = getattr(record, "rank", 0)
        if (rank and self.shared and record.levelno < logging.ERROR) or _is_shown_by_the_caller():
            return
        try:
            text = plain(record.getMessage())
            if record.levelno >= logging.ERROR:
                text = f"rank {rank}: {text}" if rank else f"error: {text}"
            self._print(text, STYLES.get(record.levelno, ""))
        except Exception:
            self.handleError(record)

    def _print(self, text: str, style: str) -> None:
        real = notices()
        if self.live is not None and real.isatty():
            self.live.print(text, style=style, highlight=False, markup=False)
        else:  # in a terminal by rich's stream, which knows about other live output, such as a sweep's table
            print(text, file=sys.stderr if real.isatty() else real, flush=True)


_rank = _Rank()
_console = _ConsoleHandler()
_console.addFilter(_rank)


def configure(quiet: bool = False, rank: int = 0, shared: bool = True) -> None:
    """Show this process's messages; under `quiet` only warnings and errors. A further call replaces the settings.

    `rank` is this process's rank; a forked process sets it anew. `shared` is True if its output is rank 0's as well.
    Python's root logger is left alone. Prints nothing if handlers of the calling program already print the messages.
    """
    if ROOT.level == logging.NOTSET:
        ROOT.setLevel(logging.INFO)
    if _console not in ROOT.handlers:
        ROOT.addHandler(_console)
    _console.setLevel(logging.WARNING if quiet else logging.INFO)
    _rank.rank, _console.shared = rank, shared


class _PlainFormatter(logging.Formatter):
    """Formats a record and escapes control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


class _RunFile(logging.StreamHandler[TextIOWrapper]):
    """Appends rank 0's messages to a run's log.txt; a full disk loses the copy, not the run."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore it."""


@contextlib.contextmanager
def to_file(path: Path) -> Iterator[None]:
    """Within the context, also append each message of rank 0 to a file, including those that `quiet` hides."""
    try:
        file = files.opened(path, "a")
    except OSError:
        yield
        return
    handler = _RunFile(file)
    handler.setFormatter(_PlainFormatter(FILE_FORMAT))
    handler.addFilter(_rank)
    handler.addFilter(lambda record: _rank.rank == 0)
    ROOT.addHandler(handler)
    try:
        yield
    finally:
        ROOT.removeHandler(handler)
        with contextlib.suppress(OSError):
            file.close()


@contextlib.contextmanager
def above(console: Console) -> Iterator[None]:
    """Within the context, print messages by this console, above its live line."""
    before, _console.live = _console.live, console
    try:
        yield
    finally:
        _console.live = before


def _forget_live_line() -> None:
    """In a forked process: forget the live line. It belongs to the parent, as does the thread that redraws it."""
    _console.live = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_live_line)


def _is_shown_by_the_caller() -> bool:
    """True if the calling program has handlers of its own that print to this process's output."""
    streams = [s for s in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, notices()) if s is not None]
    handlers = logging.getLogger().handlers if ROOT.propagate else []
    return any(getattr(handler, "stream", None) in streams or hasattr(handler, "console") for handler in handlers)

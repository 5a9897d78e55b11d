"""Keeps a logger from holding up a run, and from ending it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from drivetrain.core.errors import UserError
from drivetrain.core.typed import JsonMapping
from drivetrain.logger.base import Logger

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext

CLOSE_S = 60.0  # for a logger to write or send what it still has, when the run has ended

messages = logging.getLogger(__name__)


def guarded(name: str, option: Logger, context: BuildContext) -> Guarded:
    """Start a logger for a run. Raises UserError where it cannot start; a resumed run goes on without it."""
    try:
        return Guarded(name, option.build(context))
    except UserError:
        raise
    except Exception as error:
        if option.required:
            raise
        problem = f"logger={name} cannot start: {_said(error)}"
        if not context.progress.updates:
            raise UserError(problem) from None
        messages.warning("%s: the run goes on without it, and metrics.jsonl has everything", problem)
        return Guarded(name, Logger())


class Guarded:
    """A logger that works in a thread of its own, and stops at its first error."""

    def __init__(self, name: str, logger: Logger) -> None:
        self._name, self._logger, self._failed = name, logger, False
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if logger.in_thread:
            self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
            self._thread.start()

    def log(self, record: JsonMapping) -> None:
        """Write one record."""
        copy = dict(record)
        self._do(lambda: self._logger.log(copy))

    def log_image(self, name: str, update: int, path: Path) -> None:
        """Show a picture."""
        self._do(lambda: self._logger.log_image(name, update, path))

    def close(self, status: str) -> None:
        """Finish the log. Waits for what is still on its way, but not for ever."""
        self._do(lambda: self._logger.end(status))
        self._do(self._close)
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                messages.warning("logger=%s is still sending after %g s: some of its records may be lost", self._name, CLOSE_S)

    def _do(self, call: Callable[[], None]) -> None:
        if self._thread is not None:
            self._calls.put(call)
        else:
            self._try(call)

    def _work(self) -> None:
        while self._thread is not None:
            call = self._calls.get()
            self._try(call)
            if call == self._close:
                return

    def _close(self) -> None:
        self._failed = False  # a logger that has failed is closed too
        self._logger.close()

    def _try(self, call: Callable[[], None]) -> None:
        """Call the logger. Its first error is logged, and is its last."""
        if self._failed and call != self._close:
            return
        before = self._failed
        try:
            call()
        except Exception as error:
            if self._logger.required:
                raise
            self._failed = True
            if not before:
                what = f"logger={self._name} failed, and the run goes on without it (metrics.jsonl has everything)"
                messages.warning("%s: %s", what, _said(error))


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")

"""The base of every logger."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from queue import SimpleQueue
from typing import ClassVar

from drivetrain.core.errors import UserError
from drivetrain.core.machine import files
from drivetrain.core.machine.paths import expanded
from drivetrain.core.options import groups
from drivetrain.core.options.option import BuildContext, Effect, Option, RunSpec, needs_extra
from drivetrain.core.typed import JsonMapping, JsonObject, fits
from drivetrain.saving import manifest


class Logger(Option, groups.Logger):
    """Writes the metrics of a run. It runs on rank 0 only and gets each record once.

    After `setup` a separate thread calls its methods, so that a slow server holds up no step.
    """

    why_fixed: ClassVar[str] = "the records belong to one run"
    in_thread = True
    required = False  # True if a failure ends the run; otherwise it is logged once and the run continues without this logger

    def effect_as_set(self) -> Effect:
        """Return "exact": it only watches."""
        return "exact"

    def setup(self, context: BuildContext) -> None:
        self.start(context.run_dir, context.progress.updates)

    def start(self, run_dir: Path, update: int) -> None:
        """Open the log in the run's directory. A resumed run continues after `update`, a new one after 0."""

    def log(self, record: JsonObject) -> None:
        """Write one record: `event` ("train", "evaluate" or "callback"), `update`, `epoch`, `time`, and numbers.

        An evaluation also has its `set`, and at the end of the run its `weights` (final, best or averaged).
        """

    def log_image(self, name: str, update: int, path: Path) -> None:
        """Show a picture, a PNG file. Loggers without pictures ignore it."""

    def end(self, status: str) -> None:
        """Note how the run ended (completed, failed, diverged or interrupted). `close` comes next."""

    def close(self) -> None:
        """Finish the log at the end of the run."""


def numbers(record: Mapping[str, object]) -> dict[str, float]:
    """Return the figures of a record, as <event>/<name>; those of an evaluation as <set>/<name>, such as validation/loss.

    The evaluations of the run's end are test/<name> of the last weights, and test_best/<name> of the best checkpoint.
    """
    place, weights = record.get("set", record["event"]), record.get("weights", "final")
    prefix = place if weights == "final" else f"{place}_{weights}"
    return {f"{prefix}/{k}": v for k, v in record.items() if k not in ("update", "time") and isinstance(v, int | float)}


CLOSE_S = 60.0  # for a logger to write or send its remaining records after the run's end

messages = logging.getLogger(__name__)


def guarded(name: str, option: Logger, context: BuildContext) -> Guarded:
    """Start a logger for a run. Raises UserError if it cannot start; a resumed run continues without it."""
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
    """A logger in its own thread, which stops at its first error."""

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
        """Finish the log. Waits for records on their way, for a limited time."""
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
        self._failed = False  # a failed logger is closed too
        self._logger.close()

    def _try(self, call: Callable[[], None]) -> None:
        """Call the logger. After its first error, which is logged, it is not called again."""
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


RUNS = "trackers.json"  # in the run's directory: package of the tracker → id of its run
ANEW = "trackers begin their own run"


@dataclass
class TrackedRun:
    """The facts of a run that a tracker gets at its start."""

    run_dir: Path
    output_dir: Path  # of all runs
    name: str
    config: JsonObject  # by dotted key, without machine-local values
    id: str | None  # of the tracker's own run, if this one is resumed


class Tracker(Logger):
    """A logger that passes the run to a tracking library."""

    package = ""  # the library's name, also that of its extra
    name: str | None = None  # of the run in the tracker; None: the run's directory

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from needs_extra(self.package, self.package, f"logger={self.package}")

    def setup(self, context: BuildContext) -> None:
        ids = context.run_dir / RUNS
        known = known_ids(ids)
        output_dir = expanded(context.run.values["output_dir"]).absolute()
        name = self.name or "-".join(context.run_dir.absolute().parts[-2:])
        run = TrackedRun(context.run_dir, output_dir, name, dict(context.config), known.get(self.package))
        write_ids(ids, {**known, self.package: self.open(run)})

    def open(self, run: TrackedRun) -> str:
        """Start the tracker's run, or continue the one named `run.id`. Returns its id."""
        raise self.unwritten("open")


def write_ids(file: Path, ids: dict[str, str]) -> None:
    """Write the ids of a run's trackers."""
    files.write_text(file, manifest.text(ids))


def known_ids(file: Path) -> dict[str, str]:
    """Read the ids of a run's trackers; {} without any. Raises UserError."""
    try:
        written = files.read_text(file)
        found = files.parse_json(written)
        if not fits(found, dict[str, str]):
            raise ValueError(f"it holds {found!r:.80}, but no ids of trackers")
        manifest.check(written, found)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({getattr(error, 'strerror', None) or error}): remove it, and {ANEW}") from None
    ids: dict[str, str] = {package: id_ for package, id_ in found.items() if package != manifest.OWN}
    if any(PurePath(id_).is_absolute() or ".." in PurePath(id_).parts for id_ in ids.values()):
        raise UserError(f"{file} holds {ids!r:.80}, and no ids of trackers: remove it, and {ANEW}")
    return ids

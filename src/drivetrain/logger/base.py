"""The base of every logger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from drivetrain.core.option import Effect, Option
from drivetrain.core.typed import JsonObject

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext


class Logger(Option):
    """Writes the metrics of a run. It runs on rank 0 only and gets each record once.

    After `setup` its methods are called in a thread of their own, so that a slow server holds up no step.
    """

    stays: ClassVar[str] = "the records are those of one run"
    in_thread = True
    required = False  # a failure ends the run; else it is logged once and the run goes on without this logger

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
        """Show a picture, a PNG file. Loggers that have no place for pictures leave it out."""

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

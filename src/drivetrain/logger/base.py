"""The base of every logger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.option import Option

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext


class Logger(Option):
    """Writes the metrics of a run. It runs on rank 0 only and gets each record once."""

    def setup(self, context: BuildContext) -> None:
        self.start(context.run_dir, context.progress.updates)

    def start(self, run_dir: Path, update: int) -> None:
        """Open the log in the run's directory. A resumed run continues after `update`, a new one after 0."""

    def log(self, record: dict[str, Any]) -> None:
        """Write one record: `event` ("train" or "evaluate"), `update`, `epoch`, and numbers."""

    def close(self) -> None:
        """Finish the log at the end of the run."""

"""logger=[trackio]: Trackio, of Hugging Face."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.core.option import RunSpec
from drivetrain.logger.base import numbers
from drivetrain.logger.tracker import TrackedRun, Tracker


class Trackio(Tracker):
    """Log to Trackio's database on this machine, or to a Space of Hugging Face: `trackio show --project drivetrain`."""

    package = "trackio"

    def __init__(
        self,
        project: str = "drivetrain",
        space_id: str | None = None,
        name: str | None = None,
        group: str | None = None,
    ) -> None:
        self.project, self.space_id, self.name, self.group = project, space_id, name, group

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if self.space_id is None:
            return
        from huggingface_hub import get_token

        if get_token() is None:
            yield (
                f"logger.trackio.space_id={self.space_id} needs a login: type `hf auth login` once, or set HF_TOKEN in the "
                "environment, or leave space_id out to log on this machine"
            )

    def open(self, run: TrackedRun) -> str:
        import trackio

        with _quiet():
            self._run = trackio.init(
                project=self.project, name=run.id or run.name, group=self.group, space_id=self.space_id, config=run.config,
                resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip
        return str(self._run.name)  # Trackio finds a run by its name

    def log(self, record: dict[str, Any]) -> None:
        self._run.log(numbers(record), step=record["update"])

    def log_image(self, name: str, update: int, path: Path) -> None:
        import trackio

        self._run.log({name: trackio.Image(str(path))}, step=update)

    def end(self, status: str) -> None:
        self._run.log({"status": status})

    def close(self) -> None:
        with _quiet():
            self._run.finish()


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """Within the context nothing is printed: Trackio's greetings would tear the live line."""
    return contextlib.redirect_stdout(io.StringIO())

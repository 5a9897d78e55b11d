"""logger=[aim]: Aim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drivetrain.logger.base import numbers
from drivetrain.logger.tracker import TrackedRun, Tracker


class Aim(Tracker):
    """Log to an Aim repository, by default in the folder of all runs: `aim up --repo outputs`."""

    package = "aim"

    def __init__(
        self,
        experiment: str = "drivetrain",
        repo: str | None = None,
        name: str | None = None,
        tags: list[str] | None = None,
    ) -> None:
        self.experiment, self.repo, self.name, self.tags = experiment, repo, name, tags

    def open(self, run: TrackedRun) -> str:
        import aim

        repo = self.repo or str(run.output_dir)
        if "://" not in repo:
            Path(repo).mkdir(parents=True, exist_ok=True)
        self._run = aim.Run(
            run_hash=run.id, repo=repo, experiment=self.experiment,
            system_tracking_interval=None, log_system_params=False, capture_terminal_logs=False,
        )  # fmt: skip
        if run.id is None:
            self._run.name, self._run["config"], self._run["run_dir"] = run.name, run.config, str(run.run_dir)
            for tag in self.tags or []:
                self._run.add_tag(tag)
        return str(self._run.hash)

    def log(self, record: dict[str, Any]) -> None:
        subset = {"subset": record["event"]}
        for name, value in numbers(record).items():
            self._run.track(value, name.partition("/")[2], record["update"], record["epoch"], context=subset)

    def log_image(self, name: str, update: int, path: Path) -> None:
        import aim

        self._run.track(aim.Image(str(path)), name, update)

    def end(self, status: str) -> None:
        self._run["status"] = status

    def close(self) -> None:
        self._run.close()

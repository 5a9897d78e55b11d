"""logger=[wandb]: Weights & Biases."""

from __future__ import annotations

import logging
import netrc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from drivetrain.core.files import folder_in
from drivetrain.core.option import RunSpec
from drivetrain.core.typed import JsonObject
from drivetrain.logger.base import TrackedRun, Tracker, numbers

messages = logging.getLogger(__name__)


class Wandb(Tracker):
    """Log to Weights & Biases, by default into the run's directory, from where `wandb sync` sends it."""

    package = "wandb"

    def __init__(
        self,
        project: str = "drivetrain",
        entity: str | None = None,
        name: str | None = None,
        tags: list[str] | None = None,
        mode: Literal["offline", "online"] = "offline",
    ) -> None:
        self.project, self.entity, self.name, self.tags, self.mode = project, entity, name, tags, mode

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.mode == "online" and not has_login():
            yield (
                "logger.wandb.mode=online needs a login: type `wandb login` once, or set WANDB_API_KEY in the environment, "
                "or set logger.wandb.mode=offline and send the run later with `wandb sync`"
            )

    def open(self, run: TrackedRun) -> str:
        folder_in(run.run_dir, "wandb")  # where the library writes
        import wandb

        # The lines that the terminal and log.txt have already are not captured a second time.
        settings = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(
            project=self.project, entity=self.entity, name=run.name, tags=self.tags, config=run.config, dir=str(run.run_dir),
            mode=self.mode, id=run.id, resume="allow" if run.id else None, reinit="create_new", settings=settings,
        )  # fmt: skip
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")  # wandb's own steps only grow, and a resume goes back
        messages.info("wandb: %s", self._run.url if self.mode == "online" else f"wandb sync {Path(self._run.dir).parent}")
        return str(self._run.id)

    def log(self, record: JsonObject) -> None:
        self._run.log({**numbers(record), "update": record["update"]})

    def log_image(self, name: str, update: int, path: Path) -> None:
        import wandb

        self._run.log({name: wandb.Image(str(path)), "update": update})

    def end(self, status: str) -> None:
        self._run.summary["status"] = status
        self._exit_code = int(status != "completed")

    def close(self) -> None:
        self._run.finish(exit_code=getattr(self, "_exit_code", 1))


def has_login() -> bool:
    """True if wandb would find a key without asking for it, where it looks itself: the environment and ~/.netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for file in [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]:
        try:
            if file and netrc.netrc(os.path.expanduser(file)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False

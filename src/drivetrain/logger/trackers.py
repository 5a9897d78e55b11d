"""Loggers that pass a run to a library: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import logging
import netrc
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from drivetrain.core.machine.files import folder_in
from drivetrain.core.options.option import RunSpec, needs_extra
from drivetrain.core.typed import JsonObject
from drivetrain.logger.base import Logger, TrackedRun, Tracker, numbers


class TensorBoard(Logger):
    """Write event files for `tensorboard --logdir outputs`."""

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from needs_extra("tensorboard", "tensorboard", "logger=tensorboard")

    def start(self, run_dir: Path, update: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder_in(run_dir, "tensorboard")), purge_step=update + 1 if update else None)

    def log(self, record: JsonObject) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["update"], walltime=record["time"])

    def log_image(self, name: str, update: int, path: Path) -> None:
        import numpy as np
        from PIL import Image

        self._writer.add_image(name, np.asarray(Image.open(path).convert("RGB")), update, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


messages = logging.getLogger(__name__)


class Wandb(Tracker):
    """Log to Weights & Biases, by default into the run's directory, from where `wandb sync` sends it."""

    package = "wandb"
    _exit_code = 1  # for a run without a known end

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
        folder_in(run.run_dir, "wandb")  # the library's folder
        import wandb

        # Lines in the terminal and log.txt are not captured a second time.
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
        self._run.finish(exit_code=self._exit_code)


def has_login() -> bool:
    """True if wandb would find a key in the environment or ~/.netrc without asking for it."""
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


CONNECT_S = 5.0  # for a server to answer when a run starts
PARAMS_AT_ONCE, PARAM_CHARACTERS = 100, 6000  # MLflow's limits
STATUS = {"completed": "FINISHED", "interrupted": "KILLED"}  # any other: FAILED


class MLflow(Tracker):
    """Log to MLflow, by default to a database in the folder of all runs: `mlflow ui --backend-store-uri sqlite:///…`."""

    package = "mlflow"

    def __init__(
        self,
        experiment: str = "drivetrain",
        uri: str | None = None,
        name: str | None = None,
        tags: list[str] | None = None,
    ) -> None:
        self.experiment, self.uri, self.name, self.tags = experiment, uri, name, tags

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self._uri().startswith("sqlite:") or not self._uri():
            yield from needs_extra("sqlalchemy", "mlflow", "logger=mlflow with a database")

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        server = urlsplit(self._uri())
        if server.scheme not in ("http", "https"):
            return
        try:  # MLflow's own client would try for minutes
            socket.create_connection(
                (server.hostname, server.port or {"http": 80, "https": 443}[server.scheme]), CONNECT_S
            ).close()
        except OSError as error:
            yield (
                f"logger=mlflow: {server.scheme}://{server.hostname} cannot be reached ({error.strerror or error}): set "
                "logger.mlflow.uri, or MLFLOW_TRACKING_URI in the environment, or logger.mlflow.uri=sqlite:///mlflow.db"
            )

    def _uri(self) -> str:
        """The given uri, or ""."""
        return self.uri or os.environ.get("MLFLOW_TRACKING_URI", "")

    def open(self, run: TrackedRun) -> str:
        uri = self._uri() or f"sqlite:///{run.output_dir / 'mlflow.db'}"
        if "://" not in uri or uri.startswith("file:"):  # a folder, which MLflow opens only on insistence
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = self._client = MlflowClient(uri)
        self._id = (
            run.id or client.create_run(self._experiment(run.output_dir), run_name=run.name, tags=self._tags(run)).info.run_id
        )
        if run.id:
            client.update_run(self._id, status="RUNNING")
        else:
            params = [Param(k, str(v)[:PARAM_CHARACTERS]) for k, v in run.config.items()]
            for first in range(0, len(params), PARAMS_AT_ONCE):
                client.log_batch(self._id, params=params[first : first + PARAMS_AT_ONCE])
        return self._id

    def _experiment(self, output_dir: Path) -> str:
        """The id of the experiment, created if missing. Files of a local one go to the folder of all runs."""
        found = self._client.get_experiment_by_name(self.experiment)
        if found is not None:
            return str(found.experiment_id)
        local = (output_dir / "mlartifacts").as_uri() if not self._uri() else None
        return str(self._client.create_experiment(self.experiment, artifact_location=local))

    def _tags(self, run: TrackedRun) -> dict[str, str]:
        """MLflow's tags need values: a tag without one becomes true."""
        pairs = (tag.partition("=") for tag in self.tags or [])
        return {**{key: value or "true" for key, _, value in pairs}, "run_dir": str(run.run_dir)}

    def log(self, record: JsonObject) -> None:
        from mlflow.entities import Metric

        at = int(record["time"] * 1000)
        metrics = [Metric(allowed(k), float(v), at, record["update"]) for k, v in numbers(record).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def log_image(self, name: str, update: int, path: Path) -> None:
        self._client.log_artifact(self._id, str(path), "images")

    def end(self, status: str) -> None:
        self._client.set_terminated(self._id, STATUS.get(status, "FAILED"))


def allowed(name: str) -> str:
    """A metric's name, restricted to MLflow's characters."""
    return re.sub(r"[^\w\-. /]", "_", name)

"""logger=[mlflow]: MLflow."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from drivetrain.core.option import RunSpec, needs_extra
from drivetrain.core.typed import JsonObject
from drivetrain.logger.base import TrackedRun, Tracker, numbers

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
        try:  # MLflow itself would try for minutes
            socket.create_connection(
                (server.hostname, server.port or {"http": 80, "https": 443}[server.scheme]), CONNECT_S
            ).close()
        except OSError as error:
            yield (
                f"logger=mlflow: {server.scheme}://{server.hostname} cannot be reached ({error.strerror or error}): set "
                "logger.mlflow.uri, or MLFLOW_TRACKING_URI in the environment, or logger.mlflow.uri=sqlite:///mlflow.db"
            )

    def _uri(self) -> str:
        """The uri that was given; "" where none was."""
        return self.uri or os.environ.get("MLFLOW_TRACKING_URI", "")

    def open(self, run: TrackedRun) -> str:
        uri = self._uri() or f"sqlite:///{run.output_dir / 'mlflow.db'}"
        if "://" not in uri or uri.startswith("file:"):  # a folder, which MLflow opens only for who insists
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
        """The id of the experiment, which is made where there is none. Files of a local one go to the folder of all runs."""
        found = self._client.get_experiment_by_name(self.experiment)
        if found is not None:
            return str(found.experiment_id)
        local = (output_dir / "mlartifacts").as_uri() if not self._uri() else None
        return str(self._client.create_experiment(self.experiment, artifact_location=local))

    def _tags(self, run: TrackedRun) -> dict[str, str]:
        """MLflow's tags have values: a tag without one is true."""
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
    """A metric's name with those characters only that MLflow takes."""
    return re.sub(r"[^\w\-. /]", "_", name)

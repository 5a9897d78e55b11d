"""Where metrics go. Files are always written."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.core.option import Option, RunSpec, needs_extra


class Logger(Option):
    """The base of every logger: told each record once, on rank 0."""

    def start(self, run_dir: Path, update: int) -> None:
        """Open in this run's directory, to go on after `update`."""

    def log(self, record: dict[str, Any]) -> None:
        """Take one record: `event` ("train" or "evaluate"), `update`, `epoch`, and numbers."""

    def close(self) -> None:
        """The run has ended."""


class Files(Logger):
    """metrics.jsonl, a line for each record with its `time` (seconds since 1970), and the same as metrics.csv at the end."""

    def start(self, run_dir: Path, update: int) -> None:
        self.path = run_dir / "metrics.jsonl"
        if self.path.exists():  # a resumed run repeats what came after its checkpoint: keep each update once
            kept = [line for line in self.path.read_text().splitlines() if _update_of(line) <= update]
            self.path.write_text("".join(line + "\n" for line in kept))
        self._file = self.path.open("a")

    def log(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps({**record, "time": round(time.time(), 3)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        records = [json.loads(line) for line in self.path.read_text().splitlines()]
        columns = list(dict.fromkeys(key for record in records for key in record))
        with self.path.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(records)


def _update_of(line: str) -> float:
    try:
        return json.loads(line)["update"]
    except (ValueError, KeyError):  # the line a kill cut short
        return float("inf")


class TensorBoard(Logger):
    """Event files for `tensorboard --logdir outputs`."""

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from needs_extra("tensorboard", "tensorboard", "logger=tensorboard")

    def start(self, run_dir: Path, update: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=update + 1 if update else None)

    def log(self, record: dict[str, Any]) -> None:
        for key, value in record.items():
            if key not in ("event", "update") and isinstance(value, int | float):
                self._writer.add_scalar(f"{record['event']}/{key}", value, record["update"])

    def close(self) -> None:
        self._writer.close()

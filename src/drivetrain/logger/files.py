"""logger=[files]: metrics as JSON lines and CSV. This logger is always on."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

from drivetrain.logger.base import Logger


class Files(Logger):
    """Write metrics.jsonl, a line for each record with its `time` (seconds since 1970), and at the end metrics.csv."""

    def start(self, run_dir: Path, update: int) -> None:
        self.path = run_dir / "metrics.jsonl"
        if self.path.exists():  # a resumed run repeats the updates after its checkpoint: keep one record of each
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
    """The update of a record; infinite for a line that is not whole because the process was killed."""
    try:
        return json.loads(line)["update"]
    except (ValueError, KeyError):
        return float("inf")

"""logger=[files]: metrics as JSON lines and CSV. This logger is always on."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.logger.base import Logger


class Files(Logger):
    """Write metrics.jsonl, a line for each record with its `time` (seconds since 1970), and at the end metrics.csv."""

    in_thread = False  # whoever reads a record's line after it was logged must find it
    required = True

    def start(self, run_dir: Path, update: int) -> None:
        self.path = run_dir / "metrics.jsonl"
        if self.path.exists():  # a resumed run repeats the updates after its checkpoint: keep one record of each
            kept = [line for line in self.path.read_text().splitlines() if _update_of(line) <= update]
            self.path.write_text("".join(line + "\n" for line in kept))
        self._file = self.path.open("a")

    def log(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        records = [json.loads(line) for line in self.path.read_text().splitlines()]
        write_table(self.path.with_suffix(".csv"), records)


class Csv(Logger):
    """Keep metrics.csv up to date while the run goes on. Files, which is always on, writes it at the end."""

    def start(self, run_dir: Path, update: int) -> None:
        self.path, lines = run_dir / "metrics.csv", run_dir / "metrics.jsonl"
        self._records = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        self._columns = write_table(self.path, self._records)

    def log(self, record: dict[str, Any]) -> None:
        self._records.append(record)
        if not set(record) <= set(self._columns):  # a new column: every row gets it
            self._columns = write_table(self.path, self._records)
            return
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(record)


def write_table(path: Path, records: Sequence[dict[str, Any]]) -> list[str]:
    """Write records as CSV, with a column for each key that one of them has. Return the columns."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(records)
    return columns


def _update_of(line: str) -> float:
    """The update of a record; infinite for a line that is not whole because the process was killed."""
    try:
        return json.loads(line)["update"]
    except (ValueError, KeyError):
        return float("inf")

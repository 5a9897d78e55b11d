"""logger=[files]: metrics as JSON lines and CSV. This logger is always on."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from drivetrain.core.machine import files
from drivetrain.core.machine.csv_rows import csv_rows
from drivetrain.core.options.option import BuildContext
from drivetrain.core.typed import JsonObject
from drivetrain.logger.base import Logger
from drivetrain.run import records
from drivetrain.run.directory import RunDirHandle
from drivetrain.saving import space

ABOUT = {"event", "update", "epoch", "time", "set", "weights"}  # keys of a record other than figures

logger = logging.getLogger(__name__)


class Files(Logger):
    """Write metrics.jsonl, a line for each record with its `time` (seconds since 1970), and at the end metrics.csv."""

    in_thread = False  # a reader must find a record's line once it is logged
    required = True

    def setup(self, context: BuildContext) -> None:
        self.start(context.run_dir, context.progress.updates, context.progress.evaluated)

    def start(self, run_dir: Path, update: int, evaluated: int | None = None) -> None:
        """Open the log. A resumed run repeats the updates after its checkpoint, and the end: keep one record of each."""

        def comes_again(record: JsonObject) -> bool:
            at_end = record.get("event") == "evaluate" and ("weights" in record or record["update"] == update != evaluated)
            begins = record.get("event") == "stage" and record["update"] == update  # the resumed run logs it again
            return at_end or begins or record["update"] > update

        self._held, path = RunDirHandle(run_dir), run_dir / "metrics.jsonl"
        evaluated = update if evaluated is None else evaluated
        if path.exists() or path.is_symlink():  # replaces a link, which would lead outside
            found = records.read(path)
            if found.unreadable:
                logger.warning("%s: %d lines could not be read, and are left out", path, found.unreadable)
            kept = [json.dumps(record) for record in found.records if not comes_again(record)]
            files.write_text(path, "".join(line + "\n" for line in kept))
        self._file = files.opened(path, "a")

    def log(self, record: JsonObject) -> None:
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise space.cannot_write("metrics.jsonl", self._held.path, str(error.strerror)) from error

    def close(self) -> None:
        try:
            self._file.close()  # records refused by a full disk are written now, into freed space
            if (folder := self._held.folder()) is not None:
                write_table(folder / "metrics.csv", as_rows(records.read(folder / "metrics.jsonl").records))
        except OSError as error:
            logger.warning("metrics.csv could not be written (%s): `drivetrain report` reads metrics.jsonl", error.strerror)


class Csv(Logger):
    """Keep metrics.csv up to date during the run. The logger Files, which is always on, writes it only at the end."""

    def start(self, run_dir: Path, update: int) -> None:
        self.path = run_dir / "metrics.csv"
        self._records = records.read(run_dir / "metrics.jsonl").records
        self._columns = write_table(self.path, as_rows(self._records))

    def log(self, record: JsonObject) -> None:
        self._records.append(record)
        since = next((n for n in range(1, len(self._records) + 1) if self._records[-n].get("event") == "train"), 1)
        row = as_rows(self._records[-since:])[-1]
        if not set(row) <= set(self._columns):  # a new column: every row gets it
            self._columns = write_table(self.path, as_rows(self._records))
            return
        with files.opened(self.path, "a", newline="") as file:
            csv_rows(file)([map(row.get, self._columns)])


def as_rows(found: Sequence[dict[str, object]]) -> list[JsonObject]:
    """Return records as rows of one table, with an evaluation's figures under its set's name, and epochs from 1."""
    rows: list[JsonObject] = []
    for row in records.with_epochs_from_1(found):
        if row.get("event") == "evaluate" and "set" in row:
            row = {key if key in ABOUT else f"{row['set']}_{key}": value for key, value in row.items()}
        rows.append(row)
    return rows


def write_table(path: Path, rows: Sequence[dict[str, object]]) -> list[str]:
    """Write records as CSV, with a column for each key in any of them. Return the columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with files.opened(path, "w", newline="") as file:
        csv_rows(file)([columns, *(map(row.get, columns) for row in rows)])
    return columns

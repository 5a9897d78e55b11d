"""A tracker: the figures of all runs in one SQLite database."""

import sqlite3
from pathlib import Path
from typing import Any

from drivetrain.logger import Logger, numbers


class Sqlite(Logger):
    """Writes each figure of a run as a row (run, update, name, value) of the table `figures`."""

    machine_local_keys = ("file",)  # a path: no recipe sets it

    def __init__(self, file: str = "figures.db") -> None:
        self.file = file

    def start(self, run_dir: Path, update: int) -> None:
        """Begin, or go on after `update` where the run is resumed: what was written after it is written again."""
        self._run = run_dir.name
        self._database = sqlite3.connect(self.file, check_same_thread=False)  # a thread of its own calls what follows
        with self._database:
            self._database.execute('CREATE TABLE IF NOT EXISTS figures (run, "update", name, value)')
            self._database.execute('DELETE FROM figures WHERE run = ? AND "update" > ?', (self._run, update))

    def log(self, record: dict[str, Any]) -> None:
        rows = [(self._run, record["update"], name, value) for name, value in numbers(record).items()]
        with self._database:
            self._database.executemany("INSERT INTO figures VALUES (?, ?, ?, ?)", rows)

    def close(self) -> None:
        self._database.close()

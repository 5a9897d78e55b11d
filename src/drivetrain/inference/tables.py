"""Tables that are written row by row: CSV, JSON lines and Parquet."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from drivetrain.core.errors import UserError
from drivetrain.ui.output import PlainStream
from drivetrain.ui.sheet import spreadsheet

Rows = Sequence[Mapping[str, Any]]


class Table(Protocol):
    """A table that is being written."""

    def write(self, rows: Rows) -> None:
        """Write rows, all of which have the same columns."""

    def close(self) -> None:
        """All rows are written."""


class Csv:
    """Rows as CSV, with a header."""

    def __init__(self, file: TextIO | PlainStream) -> None:
        self._file, self._writer = file, csv.writer(file, lineterminator="\n")
        self._begun = False

    def write(self, rows: Rows) -> None:
        if not self._begun:
            self._writer.writerow(map(_cell, rows[0]))
            self._begun = True
        self._writer.writerows([_cell(value) for value in row.values()] for row in rows)
        self._file.flush()

    def close(self) -> None:
        if self._file is not sys.stdout and not isinstance(self._file, PlainStream):
            self._file.close()


def _cell(value: Any) -> Any:
    """A value as a cell of CSV: a class may have been named by a stranger. A row of standard input, as "-[1]", stays as it is."""
    is_text = isinstance(value, str) and not re.fullmatch(r"-\[\d+\]", value)
    return spreadsheet(value) if is_text else "" if value is None else value


class JsonLines:
    """Each row as a JSON object on a line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, rows: Rows) -> None:
        self._file.writelines(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Parquet:
    """Rows as Parquet, by pyarrow; each batch is a row group."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None

    def write(self, rows: Rows) -> None:
        import pyarrow
        from pyarrow import parquet

        if self._writer is None:
            self._types = pyarrow.schema([(name, _type(name, [row[name] for row in rows])) for name in rows[0]])
            self._writer = parquet.ParquetWriter(self._path, self._types)
        self._writer.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows], self._types))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _type(name: str, values: Sequence[object]) -> Any:
    """Return a column's type: text where one of its values is a text, or where none is known."""
    import pyarrow

    known = [value for value in values if value is not None]
    numbers = all(isinstance(value, int | float) for value in known) and (known or name.startswith(("p_", "prob", "value")))
    return pyarrow.float64() if numbers and name not in ("input", "label", "error") else pyarrow.string()


class Output:
    """The table of predictions: a file that is there only once it is complete, or CSV on standard output."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._temporary = None if path is None else path.with_name(f".{path.name}.writing")
        self._table: Table
        if path is None or self._temporary is None:
            self._table = Csv(PlainStream() if sys.stdout.isatty() else sys.stdout)
            return
        kind = path.suffix.lower()
        if kind not in (".csv", ".jsonl", ".parquet"):
            raise UserError(f"--out {path}: the name must end in .csv, .jsonl or .parquet")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._temporary.touch()
        except OSError as error:
            raise UserError(f"--out {path} cannot be written: {error.strerror}") from None
        if kind == ".parquet":
            self._table = Parquet(self._temporary)
        else:
            file = self._temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace")
            self._table = Csv(file) if kind == ".csv" else JsonLines(file)

    def write(self, rows: Rows) -> None:
        """Write rows, in order."""
        if rows:
            self._table.write(rows)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._table.close()
        if self.path is None or self._temporary is None:
            return
        if kind is None and self._temporary.exists():
            self._temporary.replace(self.path)
        else:
            with suppress(OSError):
                self._temporary.unlink()

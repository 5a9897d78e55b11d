"""Predictions for a stream of inputs, as a table: in order, in bounded memory, with a row for each input."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from drivetrain.core.errors import UserError
from drivetrain.inference.inputs import Item, Read, grouped, read_in_batches
from drivetrain.inference.loaded import LoadedRun
from drivetrain.ui.output import PlainStream
from drivetrain.ui.sheet import spreadsheet

if TYPE_CHECKING:
    from pyarrow import DataType

Place = tuple[int, int]  # id of a read, and the number of one of its samples
Row = Mapping[str, object]
Write = Callable[[Sequence[Row]], object]  # of rows, all of which have the same columns
SUFFIXES = (".csv", ".jsonl", ".parquet")


class Predictor(Protocol):
    """The predictions of a model for the inputs of a batch, as columns of their rows."""

    @property
    def columns(self) -> Sequence[str]: ...
    def __call__(self, batch: Sequence[Read]) -> Iterator[tuple[Place, Row]]:
        """Yield the columns of each input that could be read; one that cannot be predicted becomes an error of its read."""


@dataclass
class Outputs:
    """Labels and probabilities, or numbers."""

    loaded: LoadedRun

    @property
    def columns(self) -> Sequence[str]:
        """The columns of a prediction: those that a batch of zeros gets."""
        return list(next(self.loaded.predict_ready(self.loaded.example()).rows()))

    def __call__(self, batch: Sequence[Read]) -> Iterator[tuple[Place, Row]]:
        for places, x in grouped(batch):
            predicted = self.loaded.predict_ready(self.loaded.transforms(x)).rows()
            yield from (((id(read), n), row) for (read, n), row in zip(places, predicted, strict=True))


class Output:
    """The table of predictions: a file that is there only once it is complete, or CSV on standard output."""

    def __init__(self, path: Path | None) -> None:
        self.path, self._kind, self._open = path, "" if path is None else path.suffix.lower(), ExitStack()
        self._temporary = None if path is None else path.with_name(f".{path.name}.writing")
        self._write: Write | None = None  # once there is a row, which has the columns
        if self._temporary is None:
            return
        if self._kind not in SUFFIXES:
            raise UserError(f"--out {path}: the name must end in .csv, .jsonl or .parquet")
        try:
            self._temporary.parent.mkdir(parents=True, exist_ok=True)
            self._temporary.touch()
        except OSError as error:
            raise UserError(f"--out {path} cannot be written: {error.strerror}") from None

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows, in order."""
        if rows:
            self._write = self._write or self._begun(rows)
            self._write(rows)

    def _begun(self, rows: Sequence[Row]) -> Write:
        """The function that writes rows like these."""
        if self._temporary is None:
            return _csv(PlainStream() if sys.stdout.isatty() else sys.stdout, rows)
        if self._kind == ".parquet":
            return _parquet(self._temporary, rows, self._open)
        file = self._temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace")
        return (_csv if self._kind == ".csv" else _json_lines)(self._open.enter_context(file), rows)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._open.close()
        if self._temporary is None or self.path is None:
            return
        if kind is None and self._temporary.exists():
            self._temporary.replace(self.path)
        else:
            with suppress(OSError):
                self._temporary.unlink()


def _csv(file: TextIO | PlainStream, first: Sequence[Row]) -> Write:
    """Rows as CSV, with a header."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(_cell, first[0]))

    def write(rows: Sequence[Row]) -> None:
        writer.writerows([_cell(value) for value in row.values()] for row in rows)
        file.flush()

    return write


def _cell(value: object) -> object:
    """A value as a cell of CSV: a class may have been named by a stranger. A row of standard input, as "-[1]", stays as it is."""
    is_text = isinstance(value, str) and not re.fullmatch(r"-\[\d+\]", value)
    return spreadsheet(str(value)) if is_text else "" if value is None else value


def _json_lines(file: TextIO, _: Sequence[Row]) -> Write:
    """Each row as a JSON object on a line."""

    def write(rows: Sequence[Row]) -> None:
        file.writelines(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        file.flush()

    return write


def _parquet(path: Path, first: Sequence[Row], opened: ExitStack) -> Write:
    """Rows as Parquet, by pyarrow; each batch is a row group."""
    import pyarrow
    from pyarrow import parquet

    types = pyarrow.schema([(name, _type(name, [row[name] for row in first])) for name in first[0]])
    writer = opened.enter_context(parquet.ParquetWriter(path, types))
    return lambda rows: writer.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows], types))


def _type(name: str, values: Sequence[object]) -> DataType:
    """A column's type: text where one of its values is a text, or where none is known."""
    import pyarrow

    known = [value for value in values if value is not None]
    numbers = all(isinstance(value, int | float) for value in known) and (known or name.startswith(("p_", "prob", "value")))
    return pyarrow.float64() if numbers and name not in ("input", "label", "error") else pyarrow.string()


def predict_all(
    loaded: LoadedRun, predictor: Predictor, items: Iterator[Item], size: int, output: Output, show: Callable[[int], None],
    with_targets: bool = False,
) -> tuple[int, str]:  # fmt: skip
    """Predict the items, about `size` at a time, and write a row for each; `show` is called with the number of predictions.

    Return how many inputs could not be read, and why the first of them could not.
    """
    columns, done, unreadable, why = predictor.columns, 0, 0, ""
    for batch in read_in_batches(items, size):
        predicted = dict(predictor(batch))
        rows = [
            _row(read, n, columns, loaded, with_targets, predicted.get((id(read), n), {}))
            for read in batch for n in range(len(read.item.names))
        ]  # fmt: skip
        output.write(rows)
        errors = [read.errors[n] for read in batch for n in sorted(read.errors)]
        done, unreadable, why = done + len(rows) - len(errors), unreadable + len(errors), why or next(iter(errors), "")
        show(done)
    return unreadable, why


def _row(read: Read, n: int, columns: Sequence[str], loaded: LoadedRun, with_targets: bool, predicted: Row) -> Row:
    """The row of an item's sample. All rows have the same columns."""
    target = {"target": loaded.name_target(read.item.targets(n) if read.item.targets else None)} if with_targets else {}
    return {"input": read.item.names[n], **dict.fromkeys(columns), **target, **predicted, "error": read.errors.get(n)}

"""Predictions for a stream of inputs, as a table: in order, in bounded memory, with a row for each input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from drivetrain.core.errors import UserError
from drivetrain.core.machine.csv_rows import csv_rows
from drivetrain.core.step.trees import leaves
from drivetrain.inference.inputs import PredictedSample, SampleBlock, grouped, read_in_batches
from drivetrain.inference.loaded import LoadedRun
from drivetrain.ui.output import PlainStream, writing

if TYPE_CHECKING:
    from pyarrow import DataType

Row = Mapping[str, object]
Write = Callable[[Sequence[Row]], object]  # of rows with the same columns
NO_NUMBER = "an input is not a number, infinite, or beyond float32: mend it"
NO_ANSWER = "the model's answer is not a number or infinite, though its inputs are finite: its weights may have diverged"
AS_FLOATS = ("p_", "prob", "value")  # prefix of the columns of numbers


@dataclass
class Outputs:
    """A model's predictions as table columns: labels and probabilities, or numbers."""

    loaded: LoadedRun

    def columns(self) -> Sequence[str]:
        """The columns of a prediction, from a batch of zeros."""
        return list(next(self.loaded.predict_ready(self.loaded.example()).rows()))

    def predict(self, batch: Sequence[PredictedSample]) -> None:
        """Set the row of each readable sample; a sample without a prediction gets an error."""
        for samples, x in grouped(batch):
            ready = self.loaded.transforms(x)
            found = self.loaded.predict_ready(ready)
            numbers = [t.reshape(len(t), -1).isfinite().all(1).tolist() for t in leaves(ready) if t.is_floating_point()]
            can = map(all, zip(*numbers, strict=True)) if numbers else repeat(True)
            for sample, row, given, answered in zip(samples, found.rows(), can, found.are_finite.tolist(), strict=False):
                sample.row, sample.error = (row, None) if given and answered else ({}, NO_ANSWER if given else NO_NUMBER)


@contextmanager
def output(path: Path | None) -> Iterator[Write]:
    """Yield a writer of table rows: into a file that appears only when complete, or as CSV on standard output."""
    if path is None:
        yield _csv(PlainStream() if sys.stdout.isatty() else sys.stdout)
        return
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"--out {path}: the name must end in .csv, .jsonl or .parquet")
    temporary = path.with_name(f".{path.name}.writing")
    with writing(f"--out {path}"):
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
    try:
        with FORMATS[path.suffix.lower()](temporary) as write:
            yield write
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def _text(writer: Callable[[TextIO], Write], path: Path) -> Iterator[Write]:
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        yield writer(file)


def _csv(file: TextIO | PlainStream) -> Write:
    """Rows as CSV, with a header."""
    write_rows, columns = csv_rows(file), list[str]()

    def write(rows: Sequence[Row]) -> None:
        if not columns:
            columns.extend(rows[0])
            write_rows([columns])
        write_rows([row[name] for name in columns] for row in rows)
        file.flush()

    return write


def _json_lines(file: TextIO) -> Write:
    """Each row as a JSON object on a line."""

    def write(rows: Sequence[Row]) -> None:
        file.writelines(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        file.flush()

    return write


@contextmanager
def _parquet(path: Path) -> Iterator[Write]:
    """Rows as Parquet, by pyarrow; each batch is a row group. A column is text if any value is text or none is known."""
    import pyarrow
    from pyarrow import parquet

    writers: list[parquet.ParquetWriter] = []  # the writer, after the first row

    def of_column(name: str, values: Sequence[object]) -> DataType:
        known = [value for value in values if value is not None]
        numbers = all(isinstance(value, int | float) for value in known) and (known or name.startswith(AS_FLOATS))
        return pyarrow.float64() if numbers and name not in ("input", "label", "error") else pyarrow.string()

    def write(rows: Sequence[Row]) -> None:
        if not writers:
            types = pyarrow.schema([(name, of_column(name, [row[name] for row in rows])) for name in rows[0]])
            writers.append(opened.enter_context(parquet.ParquetWriter(path, types)))
        writers[0].write_table(pyarrow.Table.from_pylist([dict(row) for row in rows], writers[0].schema))

    with ExitStack() as opened:
        yield write


FORMATS: dict[str, Callable[[Path], AbstractContextManager[Write]]] = {
    ".csv": partial(_text, _csv), ".jsonl": partial(_text, _json_lines), ".parquet": _parquet,
}  # fmt: skip


def predict_all(
    predictor: Outputs,
    blocks: Iterator[SampleBlock],
    size: int,
    write: Write,
    show: Callable[[int], None],
    with_targets: bool = False,
) -> tuple[int, str]:
    """Predict blocks, about `size` samples at a time, and write a row for each; `show` is called with the number of predictions.

    Return the number of inputs without an answer, and the first one's reason.
    """
    empty, name_target, done, unreadable, why = dict.fromkeys(predictor.columns()), predictor.loaded.name_target, 0, 0, ""
    for batch in read_in_batches(blocks, size):
        predictor.predict(batch)
        targets = [{"target": name_target(sample.target)} if with_targets else {} for sample in batch]
        write([
            {"input": sample.name, **empty, **target, **sample.row, "error": sample.error}
            for sample, target in zip(batch, targets, strict=True)
        ])  # fmt: skip
        errors = [sample.error for sample in batch if sample.error is not None]
        done, unreadable, why = done + len(batch) - len(errors), unreadable + len(errors), why or next(iter(errors), "")
        show(done)
    return unreadable, why

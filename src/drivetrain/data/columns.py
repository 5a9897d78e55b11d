"""Tables of named columns, from CSV, Parquet and NumPy files."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import DataError, UserError, did_you_mean
from drivetrain.data.base import hash_fraction
from drivetrain.data.untrusted import lines_of

if TYPE_CHECKING:
    import numpy as np

FORMATS = (".csv", ".tsv", ".parquet", ".npy", ".npz")
MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}  # cells of a CSV without a value, in lower case

Columns = Mapping[str, "np.ndarray"]  # (rows,): float64, NaN where a value is missing, or texts (object), None where missing


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """Read a table. The first line of a CSV names its columns; an array's are named by their numbers. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    readers = {".csv": _read_csv, ".tsv": _read_csv, ".parquet": _read_parquet, ".npy": _read_npy, ".npz": _read_npz}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path} is no table that can be read: give a file whose name ends in {', '.join(FORMATS)}")
    try:
        columns = reader(path)
    except UserError:
        raise
    except Exception as error:  # a damaged file can make a reader fail in any way
        raise UserError(f"{path} cannot be read as a table: {error}") from None
    if not columns or not len(next(iter(columns.values()))):
        raise UserError(f"{path} has no rows")
    return columns


def column(columns: Columns, name: str, setting: str, path: Path) -> np.ndarray:
    """Return a column by its name. Raises UserError, which names the setting that asked for it."""
    if name not in columns:
        raise UserError(f"{setting}={name} is no column of {path}: {did_you_mean(name, columns)}")
    return columns[name]


def is_text(values: np.ndarray) -> bool:
    """Whether a column holds texts, not numbers."""
    return bool(values.dtype == object)


def as_text(cell: Any) -> str:
    """Return a cell as the name of a class or category: whole numbers without a decimal point, as texts have them."""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def missing(values: np.ndarray) -> np.ndarray:
    """Return where values are missing, bool (rows,)."""
    import numpy as np

    return np.array([value is None for value in values], dtype=bool) if is_text(values) else np.isnan(values)


def held_out(columns: Columns, share: float) -> np.ndarray:
    """Return which rows are held out, bool (rows,), by the hash of their content: the same ones when rows are added or moved."""
    import numpy as np

    return np.array([hash_fraction(row) < share for row in contents(columns)], dtype=bool)


def contents(columns: Columns) -> list[str]:
    """Return the content of each row as a text."""
    return [repr(row) for row in zip(*(values.tolist() for values in columns.values()), strict=True)]


def typed(values: Iterable[Any]) -> np.ndarray:
    """Return numbers as float64, everything else as texts."""
    import numpy as np

    cells = [None if isinstance(value, str) and value.strip().lower() in MISSING else value for value in values]
    try:
        return np.array([np.nan if cell is None else float(cell) for cell in cells])
    except (TypeError, ValueError):
        texts = np.empty(len(cells), dtype=object)
        texts[:] = [None if cell is None else str(cell).strip() for cell in cells]
        return texts


def _read_csv(path: Path) -> dict[str, np.ndarray]:
    names, rows = csv_rows(lines_of(path, newline="", encoding="utf-8-sig"), str(path))
    table = [cells(row, names, f"{path}: row {number}") for number, row in enumerate(rows, 2)]
    return {name: typed(values) for name, values in zip(names, zip(*table, strict=True), strict=False)}


def csv_rows(lines: Iterable[str], source: str) -> tuple[list[str], Iterator[list[str]]]:
    """Return the column names that the first line gives, and the rows, read one by one. Raises UserError."""
    lines = iter(lines)
    first = next(lines, "")
    separator = max(",;\t|", key=first.count)  # the one of the first line; a comma where there is none
    reader = csv.reader(chain([first], lines), delimiter=separator)
    names = [name.strip() for name in next(reader, [])]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{source} has several columns of one name ({', '.join(twice)}): its first line must name each once")
    return names, filter(None, reader)


def cells(row: list[str], names: Sequence[str], where: str) -> list[str]:
    """Return a row that has a cell for each column. Raises DataError."""
    if len(row) != len(names):
        raise DataError(f"{where} has {len(row)} cells, and the first line names {len(names)} columns")
    return row


def _read_parquet(path: Path) -> dict[str, np.ndarray]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise UserError(
            f"{path}: Parquet needs the package 'pyarrow', which is not installed: pip install 'drivetrain[parquet]'"
        ) from None
    table = parquet.read_table(path)
    return {name: typed(table.column(name).to_pylist()) for name in table.column_names}


def _read_npy(path: Path) -> dict[str, np.ndarray]:
    import numpy as np

    array = np.load(path, allow_pickle=False)
    if array.ndim != 2:
        raise UserError(f"{path} has the shape {array.shape}: a table has rows and columns")
    return {str(i): typed(array[:, i].tolist()) for i in range(array.shape[1])}


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a file: one with one dimension is a column of its name, one with two gives columns name0, name1, …"""
    import numpy as np

    columns: dict[str, np.ndarray] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            array = arrays[name]
            if array.ndim == 1:
                columns[name] = typed(array.tolist())
            elif array.ndim == 2:
                columns |= {f"{name}{i}": typed(array[:, i].tolist()) for i in range(array.shape[1])}
            else:
                raise UserError(f"{path}: {name} has the shape {array.shape}: a table's arrays have one or two dimensions")
    if len({len(values) for values in columns.values()}) > 1:
        raise UserError(f"{path}: its arrays have different numbers of rows")
    return columns


def number_of_rows(columns: Columns) -> int:
    """Return the number of rows."""
    return len(next(iter(columns.values())))


def rows_of(columns: Columns, which: np.ndarray | slice) -> dict[str, np.ndarray]:
    """Return the rows where `which` (rows,) is true, or a slice of them."""
    return {name: values[which] for name, values in columns.items()}


def named(names: Sequence[str]) -> str:
    """Return columns for a message, the first ten."""
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")

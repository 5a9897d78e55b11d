"""Opens tables in files: separated text, Parquet and NumPy, which show by their first bytes what they are."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import arrow_compute as pc
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import pyarrow as pa
from drivetrain.data import untrusted
from drivetrain.data.cells import Block, Cells, Words, strings, with_nan
from drivetrain.data.separated import MISSING, NO_NAME, Form, TextTable

KINDS = "CSV and other separated text, Parquet, NumPy; text may be packed by gzip, bzip2, xz or zstd"


def open_table(path: Path, form: Form) -> TextTable | NativeTable:
    """Open a table, which shows by its first bytes what it is. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    try:
        content = untrusted.unpacked(untrusted.mapped(path), path)
        begin = bytes(content[:8])
        if begin.startswith(b"PAR1"):
            return NativeTable(_parquet(content, str(path)), form, str(path))
        if begin.startswith((b"\x93NUMPY", b"PK\x03\x04")):
            return NativeTable(_numpy(content, path), form, str(path))
        if b"\0" in bytes(content[:1024]) and not untrusted.bom_of(begin) and form.encoding is None:
            raise UserError(
                f"{path} is no table that can be read ({KINDS}): save it as CSV, or set data.encoding, such as utf-16"
            )
        return TextTable(content, form, str(path))
    except UserError:
        raise
    except Exception as error:  # a damaged file can make a reader fail in any way
        raise UserError(f"{path} cannot be read as a table: {error}") from None


class NativeTable:
    """A file whose columns have types: Parquet, NumPy."""

    decimal = ""

    def __init__(self, columns: Mapping[str, Callable[[tuple[str, ...]], np.ndarray | Words]], form: Form, source: str) -> None:
        self._columns, self._form, self._source, self.names = columns, form, source, list(columns)
        self.refused: dict[str, UserError] = {}  # columns that hold neither numbers nor texts

    def cells(self, plain: Collection[str] | None = None, wanted: Collection[str] | None = None) -> Cells:
        """Return the cells of the columns `wanted` (None: all that can be read). Raises UserError."""
        columns: dict[str, np.ndarray | Words] = {}
        for name in self.names if wanted is None else [name for name in self.names if name in wanted]:
            try:
                columns[name] = self._columns[name](self._form.missing)
            except UserError as error:
                self.refused[name] = error
                if wanted is not None:
                    raise
        if not columns or not len(next(iter(columns.values()))):
            raise UserError(f"{self._source} has no rows")
        return Cells(columns, self._source)

    def blocks(self, size: int, plain: Collection[str], wanted: Collection[str]) -> Iterator[Block]:
        """Yield the rows as `Stream.blocks` does."""
        cells = self.cells(plain, wanted)
        for first in range(0, len(cells), size):
            block = cells[first : first + size]
            yield len(block), block.__getitem__


def _parquet(content: Any, source: str) -> dict[str, Callable[[tuple[str, ...]], np.ndarray | Words]]:
    from pyarrow import parquet

    file = parquet.ParquetFile(pa.BufferReader(pa.py_buffer(content)))
    return {
        _index_name(field.name): partial(_typed, partial(file.read, [field.name]), field.name, source)
        for field in file.schema_arrow
    }


def _index_name(name: str) -> str:
    """The name of a column; that of the rows' numbers which pandas leaves is as a CSV has it."""
    return NO_NAME if name.startswith("__index_level_") else name


def _typed(read: Callable[[], pa.Table], name: str, source: str, missing: tuple[str, ...]) -> np.ndarray | Words:
    """Return a typed column as numbers, or as the texts that a CSV would have."""

    array = read().column(0).combine_chunks()
    kind = array.type
    if pa.types.is_dictionary(kind):
        array, kind = array.cast(kind.value_type), kind.value_type
    try:
        if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            raise pa.ArrowNotImplementedError
        if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            return with_nan(array.cast(pa.float64()))
        if pa.types.is_integer(kind):
            try:
                return with_nan(pc.cast(array, pa.float64()))  # exact, or refused
            except pa.ArrowInvalid:
                return Words.of(array.cast(pa.string()), missing)
        return Words.of(array.cast(pa.string()), missing)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise UserError(f"{source}: the column {name} holds {kind}, which is no number and no text: leave it out") from None


def _numpy(content: Any, path: Path) -> dict[str, Callable[[tuple[str, ...]], np.ndarray | Words]]:
    """The columns of arrays: of one with two dimensions by their numbers, after the array's name where it has one."""

    loaded = np.load(io.BytesIO(bytes(content)), allow_pickle=False)
    columns: dict[str, np.ndarray] = {}
    for prefix, array in {"": loaded}.items() if isinstance(loaded, np.ndarray) else loaded.items():
        if array.ndim == 2:
            columns |= {f"{prefix}{n}": array[:, n] for n in range(array.shape[1])}
        elif array.ndim == 1 and prefix:
            columns[prefix] = array
        else:
            raise UserError(f"{path}: {prefix or 'it'} has the shape {array.shape}: a table has rows and columns")
    if len(set(map(len, columns.values()))) > 1:
        raise UserError(f"{path}: its arrays have different numbers of rows")
    return {name: partial(of_array, values) for name, values in columns.items()}


def of_array(values: np.ndarray, missing: tuple[str, ...] = MISSING) -> np.ndarray | Words:
    """Return an array's values as a column. Raises UserError."""

    if values.dtype.kind in "fiu":
        numbers = values.astype(np.float64)
        if values.dtype.kind == "f" or bool((np.abs(numbers) <= 2**53).all()):
            return numbers
    if values.dtype.kind not in "iubUSM":
        raise UserError(f"an array of {values.dtype} holds neither numbers nor texts")
    texts = np.char.lower(values.astype(str)) if values.dtype.kind == "b" else values.astype(str)
    return Words.of(strings(texts.tolist()), missing)

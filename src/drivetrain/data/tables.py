"""Reads tables from files, by pyarrow: separated text (CSV and its like), Parquet and NumPy."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.core.errors import DataError, UserError, told
from drivetrain.core.lazy import arrow_compute as pc
from drivetrain.core.lazy import arrow_csv
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import pyarrow as pa
from drivetrain.data import untrusted
from drivetrain.data.cells import Block, Cells, Words, numbers_of, strings, with_nan
from drivetrain.data.untrusted import Content

SEPARATORS = ",;\t|"  # that a file may have without being asked
MISSING = ("", "na", "n/a", "#n/a", "<na>", "nan", "null", "none", "?", "-", "--", ".")  # cells without a value, in lower case
NO_NAME = "(column 1)"  # the name of a first column without one: the numbers of rows
FIRST = 1 << 17  # bytes that show which columns hold fractions
BLOCK = 1 << 21  # bytes that pyarrow reads at a time: the longest row
MOST_LINES = 1000  # of one row, which quotes hold together
_LINE_END = re.compile(rb"\r\n?|\n")
FRACTION = r"[-+]?\d+[.]\d+([eE][-+]?\d+)?"


@dataclass(frozen=True)
class Form:
    """The form of a table's file, as the user set it; None: as found in the file."""

    separator: str | None = None
    encoding: str | None = None
    header: bool | None = None
    missing: tuple[str, ...] = MISSING


@dataclass
class RowLayout:
    """The layout of the rows of a separated text."""

    names: list[str]
    separator: str
    form: Form
    source: str
    header: bytes  # the first line, with its end; empty where it is no header

    @classmethod
    def found(cls, first: bytes, form: Form, source: str) -> RowLayout:
        """Return the layout that the first line shows. Raises UserError."""
        line = untrusted.decode(first, source)
        separator = form.separator or max(SEPARATORS, key=lambda sep: len(_split(line, sep)))
        cells = [cell.strip() for cell in _split(line, separator)]
        if len(cells) == 1 and form.separator is None and len(line.split()) > 1 and re.fullmatch(r"[\s\d.+-]+", line):
            raise UserError(f"{source}: line 1 holds numbers between spaces: set data.delimiter=' '")
        if form.header is None and (
            any(re.fullmatch(FRACTION, cell) for cell in cells) or (cells and all(map(is_number, cells)))
        ):
            raise UserError(
                f"{source}: line 1 holds the number {next(filter(is_number, cells))} where names of columns are expected: set "
                "data.header=false, where it is a row (its columns are then 0, 1, …), or data.header=true"
            )
        if form.header is False:
            return cls([str(n) for n in range(len(cells))], separator, form, source, b"")
        if twice := sorted({name for name in cells if name and cells.count(name) > 1}):
            raise UserError(f"{source} has several columns of one name ({', '.join(twice)}): its first line must name each once")
        return cls([name or NO_NAME.replace("1", str(n)) for n, name in enumerate(cells, 1)], separator, form, source, first)

    def parse(
        self,
        content: Content | memoryview,
        plain: Collection[str],
        wanted: Collection[str] | None,
        lines: np.ndarray | None = None,
    ) -> Cells:
        """Return the cells of rows; those of the columns `plain` as numbers, unless one is none. Raises DataError.

        `lines` are those of the rows of this content; without them they are the text's, from its first line on.
        """
        first = len(_LINE_END.findall(self.header)) + 1
        if self.separator == " ":
            content = re.sub(rb"[ \t]+", b" ", re.sub(rb"(?m)^[ \t]+|[ \t]+(?=\r?$)", b"", bytes(content)))
        columns = {name: pa.float64() if name in plain else pa.string() for name in self.names}
        convert = arrow_csv.ConvertOptions(
            column_types=columns, include_columns=None if wanted is None else [n for n in self.names if n in wanted],
            null_values=["NaN", *(form for word in self.form.missing for form in {word, word.upper(), word.title()})],
        )  # fmt: skip

        def read(quoted: bool) -> pa.Table:
            parse = arrow_csv.ParseOptions(
                delimiter=self.separator, newlines_in_values=quoted, ignore_empty_lines=len(self.names) > 1
            )
            data = pa.BufferReader(pa.py_buffer(content))
            several = len(memoryview(content)) > BLOCK  # blocks; one takes no threads, which a process would end with
            options = arrow_csv.ReadOptions(column_names=self.names, block_size=BLOCK, use_threads=several)
            return arrow_csv.read_csv(data, options, parse, convert)

        try:
            table = read(quoted := b'"' in bytes(memoryview(content)[:FIRST]))  # where there are none, it is faster
            if (quotes := _quotes(content)) % 2:
                raise pa.ArrowInvalid("a quote is not closed")
            table = read(True) if quotes and not quoted else table
        except pa.ArrowInvalid as error:
            if "straddling" in str(error) and memoryview(content).nbytes > BLOCK:
                raise DataError(
                    f"{self.source} has a row of more than {BLOCK:,} bytes: it is no table, or a quote is open"
                ) from None
            if plain:
                return self.parse(content, (), wanted, lines)
            header = "the first line names" if self.header else "line 1 has"
            records = self._records(content, first if lines is None else int(lines[0]))
            wrong = [
                f"{self.source}:{number} has {len(cells)} cells, and {header} {len(self.names)} columns"
                for number, cells in records if len(cells) != len(self.names)
            ]  # fmt: skip
            if wrong:
                raise DataError(told(wrong, f"{len(wrong):,} rows have another number of cells: mend them")) from None
            raise DataError(f"{self.source} cannot be read as a table: {error}") from None
        found = zip(table.column_names, table.columns, strict=True)
        return Cells(
            {
                name: with_nan(each.combine_chunks()) if pa.types.is_floating(each.type) else Words.of(each, self.form.missing)
                for name, each in found
            }, self.source,
            partial(self._lines, content, first, table.num_rows) if lines is None else lines.__getitem__,
        )  # fmt: skip

    def _lines(self, content: Content | memoryview, first: int, count: int, rows: np.ndarray) -> np.ndarray:
        """Return the lines of some of `count` rows. Raises DataError."""
        view = memoryview(content)
        ends = sum(bytes(view[start : start + BLOCK]).count(b"\n") for start in range(0, view.nbytes, BLOCK))
        if count == ends + (bytes(view[-1:]) != b"\n"):  # each row is a line
            return np.asarray(rows + first)
        return np.asarray(np.array([number for number, _ in self._records(content, first)])[rows])

    def _records(self, content: Content | memoryview, first: int) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of each row's first line, and its cells. Raises DataError for other bytes and an open quote."""
        lines = io.BytesIO(bytes(content).replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
        texts = (untrusted.decode(line, self.source, number) for number, line in enumerate(lines, first))
        reader, number = csv.reader(texts, delimiter=self.separator, strict=True), first
        try:
            for cells in reader:
                if cells or len(self.names) == 1:
                    yield number, cells or [""]
                number = first + reader.line_num
        except csv.Error as error:
            raise DataError(f'{self.source}:{number}: a quote (") is not closed, or stands within a text: {error}') from None


class TextTable:
    """A file of separated text."""

    refused: ClassVar[dict[str, UserError]] = {}

    def __init__(self, content: Content, form: Form, source: str) -> None:
        content = untrusted.as_utf8(content, form.encoding, source)
        end, most = 0, len(content)
        if not bytes(content[:FIRST]).strip():
            raise UserError(f"{source} has no rows")
        while end < most and (end == 0 or content[:end].count(b'"') % 2):
            found = _LINE_END.search(content, end, end + untrusted.MOST_LINE)
            if found is None and most - end > untrusted.MOST_LINE:
                raise untrusted.no_end(source)
            end = most if found is None else found.end()
        self.layout = RowLayout.found(bytes(content[:end]), form, source)
        self._content, self._body = content, memoryview(content)[len(self.layout.header) :]
        self.names = self.layout.names
        self.decimal = "," if self.layout.separator == ";" else ""  # the mark that numbers probably have

    def cells(self, plain: Collection[str] | None = None, wanted: Collection[str] | None = None) -> Cells:
        """Return the cells of the columns `wanted` (None: all); `plain` names those with plain numbers. Raises UserError."""
        if not bytes(self._body[:FIRST]).strip():
            raise UserError(f"{self.layout.source} has no rows")
        return self.layout.parse(self._body, self._plain() if plain is None else plain, wanted)

    def blocks(self, size: int, plain: Collection[str], wanted: Collection[str]) -> Iterator[Block]:
        """Yield the rows as `StreamedTable.blocks` does."""
        return StreamedTable(_lines(self._content), replace(self.layout.form, encoding=None), self.layout.source).blocks(
            size, plain, wanted
        )

    def _plain(self) -> list[str]:
        """Return the columns that hold fractions in the first rows: no code has any."""
        first = bytes(self._body[: FIRST + 1])
        if len(first) > FIRST:
            first = first[: first.rfind(b"\n") + 1]
        try:
            columns = self.layout.parse(first, (), None).columns
        except DataError:  # it ends within a row; or a row is wrong, which reading all of them finds
            return []
        return [name for name, words in columns.items() if isinstance(words, Words) and _has_fractions(words)]


class StreamedTable:
    """A table of separated text that is read some rows at a time, as its lines come."""

    def __init__(self, lines: Iterable[bytes], form: Form, source: str) -> None:
        self._rows = self._joined(untrusted.utf8_lines(lines, form.encoding, source))
        first = next(self._rows, (1, b""))
        self._layout = RowLayout.found(first[1], form, source)
        self._rows = self._rows if self._layout.header else chain([first], self._rows)
        self.names = self._layout.names

    def blocks(self, size: int, plain: Collection[str], wanted: Collection[str]) -> Iterator[Block]:
        """Yield up to `size` rows at a time: their places, and what reads the cells of some of them. Reading raises DataError."""
        rows = (row for row in self._rows if row[1].strip() or len(self.names) == 1)
        while block := list(islice(rows, size)):
            places = [f"{self._layout.source}:{number}" for number, _ in block]
            yield places, partial(self._cells, block, plain, wanted)

    def _cells(self, block: list[tuple[int, bytes]], plain: Collection[str], wanted: Collection[str], which: slice) -> Cells:
        rows = block[which]
        return self._layout.parse(b"".join(row for _, row in rows), plain, wanted, np.array([number for number, _ in rows]))

    @staticmethod
    def _joined(lines: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield each row with its first line's number: lines are one row where a quote is open between them.

        One that stays open for many lines, or to the end, is one row, which cannot be read.
        """
        numbered, row, is_open = enumerate(lines, 1), list[tuple[int, bytes]](), False
        again: list[tuple[int, bytes]] = []
        while True:
            if (one := again.pop() if again else next(numbered, None)) is not None:
                number, line = one
                row.append((number, line if line.endswith((b"\n", b"\r")) else line + b"\n"))
                is_open ^= line.count(b'"') % 2 == 1
            elif not row:
                return
            if one is None or len(row) > MOST_LINES:
                yield row[0]
                again += reversed(row[1:])
            elif is_open:
                continue
            else:
                yield row[0][0], b"".join(line for _, line in row)
            row, is_open = [], False


def _lines(content: Content) -> Iterator[bytes]:
    start = 0
    while start < len(content):
        end = content.find(b"\n", start, start + untrusted.MOST_LINE) + 1 or start + untrusted.MOST_LINE
        yield bytes(content[start:end])
        start = end


def _split(line: str, separator: str) -> list[str]:
    if separator == " ":
        line = " ".join(line.split())
    return next(csv.reader(io.StringIO(line, newline=""), delimiter=separator), [])


def is_number(cell: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?", cell) is not None


def _has_fractions(words: Words) -> bool:
    """True if all words are plain numbers, and one has a fraction that is no group of thousands, as 1.234 may be."""
    try:
        words.words.cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    fractions = pc.match_substring_regex(words.words, r"\.(\d{1,2}|\d{4,})$|\.\d{3}[eE]|^\d{4,}\.|^[-+]?0?\.")
    return bool(numbers_of(fractions).any())


def _quotes(content: Content | memoryview) -> int:
    """Return the number of quotes in some bytes, or in the end of some."""
    view = memoryview(content)
    whole: Any = view.obj
    if whole.find(b'"', len(whole) - view.nbytes) < 0:  # six times as fast as a search through the view
        return 0
    return sum(bytes(view[start : start + BLOCK]).count(b'"') for start in range(0, view.nbytes, BLOCK))


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
        """Yield the rows as `StreamedTable.blocks` does."""
        cells = self.cells(plain, wanted)
        for first in range(0, len(cells), size):
            block = cells[first : first + size]
            places = block.places()
            yield [places(row) for row in range(len(block))], block.__getitem__


def _parquet(content: object, source: str) -> dict[str, Callable[[tuple[str, ...]], np.ndarray | Words]]:
    from pyarrow import parquet

    file = parquet.ParquetFile(pa.BufferReader(pa.py_buffer(content)))
    names = {name: NO_NAME if name.startswith("__index_level_") else name for name in file.schema_arrow.names}  # as a CSV has it
    return {named: partial(typed, partial(file.read, [name]), name, source) for name, named in names.items()}


def typed(read: Callable[[], pa.Table], name: str, source: str, missing: tuple[str, ...]) -> np.ndarray | Words:
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


def _numpy(content: Content, path: Path) -> dict[str, Callable[[tuple[str, ...]], np.ndarray | Words]]:
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

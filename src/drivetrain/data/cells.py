"""Columns of a table in memory, as pyarrow read them: numbers, or words; and small readers of pyarrow's arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

from drivetrain.core.lazy import arrow_compute as pc
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import pyarrow as pa
from drivetrain.data.validation import hash_of


class Words:
    """A column of texts: its distinct words, and for each row the number of its word; -1 where there is none."""

    def __init__(self, codes: np.ndarray, words: pa.StringArray) -> None:
        self.codes, self.words = codes, words

    @classmethod
    def of(cls, array: Any, missing: Collection[str]) -> Words:
        """Return the words of an array of texts, without the spaces around them."""

        found = array.dictionary_encode()
        trimmed = pc.utf8_trim_whitespace(found.dictionary).dictionary_encode()
        absent = pc.is_in(pc.utf8_lower(trimmed.dictionary), value_set=strings(missing))
        number = np.append(np.cumsum(~numbers_of(absent)) - 1, -1)  # the last one stands for null
        number[:-1][numbers_of(absent)] = -1
        codes = number[np.append(numbers_of(trimmed.indices), -1)[_codes(found.indices)]]
        return cls(codes.astype(np.int32), trimmed.dictionary.filter(pc.invert(absent)))

    @cached_property
    def texts(self) -> list[str]:
        """The distinct words."""
        texts: list[str] = self.words.to_pylist()
        return texts

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Any) -> Words:
        return Words(self.codes[rows], self.words)


Block = tuple[int, Callable[[slice], "Cells"]]


class Cells:
    """Columns of a table: float64 (n,), NaN where a number is missing, parts of dates (n, k), or words; and where rows stand."""

    def __init__(self, columns: Mapping[str, np.ndarray | Words], source: str, line: Callable[[int], int] | None = None) -> None:
        self.columns, self.source, self.line = columns, source, line

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows: Any) -> Cells:
        """Return some rows: a slice, or where a mask is true."""

        line, number = self.line, np.arange(len(self))[rows]
        columns = {name: values[rows] for name, values in self.columns.items()}
        return Cells(columns, self.source, None if line is None else lambda row: line(int(number[row])))

    def place(self, row: int) -> str:
        """Return where a row stands, for messages: its file and line."""
        return f"{self.source}, row {row + 1}" if self.line is None else f"{self.source}:{self.line(row)}"

    def keys(self) -> np.ndarray:
        """Return a number (n,) uint64 for each row by its content, in whichever order its columns and rows stand."""

        total = np.zeros(len(self), np.uint64)
        for name, values in self.columns.items():
            if isinstance(values, Words):
                total += _mixed(hash_of([*values.texts, ""])[values.codes] ^ hash_of([name]))
                continue
            for part, numbers in enumerate(values.reshape(len(values), -1).T):
                bits = np.where(np.isnan(numbers), np.nan, numbers + 0.0).view(np.uint64)
                total += _mixed(bits ^ hash_of([f"{name}.{part}"]))
        return _mixed(total)

    def held_out(self, share: float) -> np.ndarray:
        """Return which rows are held out, bool (n,), by the hash of their content: the same ones when rows are added or moved."""
        fractions: np.ndarray = (self.keys() >> 11) / 2**53
        return fractions < share


def _mixed(bits: np.ndarray) -> np.ndarray:
    """Return splitmix64 of numbers (n,) uint64."""

    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def absent(values: np.ndarray | Words) -> np.ndarray:
    """Return where values are missing, bool (n,)."""

    missing: np.ndarray = values.codes < 0 if isinstance(values, Words) else np.isnan(values.reshape(len(values), -1)[:, 0])
    return missing


def strings(texts: Collection[str]) -> pa.StringArray:
    """Return texts as an array. `pyarrow.array` would import pandas where it is installed."""

    encoded = [text.encode(errors="surrogatepass") for text in texts]
    ends = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    return pa.StringArray.from_buffers(len(encoded), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))


def numbers_of(array: Any) -> np.ndarray:
    """Return an array's numbers or truths, whatever they are where one is missing. `to_numpy` would import pandas."""

    if pa.types.is_boolean(array.type):
        return _bits(array, 1)
    values: Any = {64: {True: np.float64, False: np.int64}, 32: {False: np.int32}}
    kind = values[array.type.bit_width][pa.types.is_floating(array.type)]
    return np.frombuffer(array.buffers()[1] or b"", kind)[array.offset : array.offset + len(array)]


def _bits(array: Any, buffer: int) -> np.ndarray:

    packed = np.frombuffer(array.buffers()[buffer] or b"", np.uint8)
    return np.unpackbits(packed, bitorder="little")[array.offset : array.offset + len(array)].astype(bool)


def with_nan(array: Any) -> np.ndarray:
    """Return an array of float64, NaN where a number is missing."""

    return np.where(_bits(array, 0), numbers_of(array), np.nan) if array.null_count else numbers_of(array)


def _codes(indices: Any) -> np.ndarray:

    return np.where(_bits(indices, 0), numbers_of(indices), -1) if indices.null_count else numbers_of(indices)

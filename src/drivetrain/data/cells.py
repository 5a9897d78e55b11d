"""The cells of a table's columns: numbers, or words by their codes, with their lines in the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from drivetrain.core.errors import MOST_TOLD, DataError
from drivetrain.core.lazy import arrow_compute as pc
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import pyarrow as pa
from drivetrain.core.lazy import torch
from drivetrain.data.base import hash_of


class Words:
    """A column of texts: its distinct words, and for each row the number of its word; -1 without one."""

    def __init__(self, codes: np.ndarray, words: pa.StringArray | list[str]) -> None:
        self.codes, self._words = codes, words

    @classmethod
    def of(cls, array: pa.Array | pa.ChunkedArray, missing: Collection[str]) -> Words:
        """Return the words of an array of texts, without the spaces around them."""
        found = array.dictionary_encode()
        found = found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
        trimmed = pc.utf8_trim_whitespace(found.dictionary).dictionary_encode()
        absent = pc.is_in(pc.utf8_lower(trimmed.dictionary), value_set=strings(missing))
        number = np.append(np.cumsum(~numbers_of(absent)) - 1, -1)  # the last one means null
        number[:-1][numbers_of(absent)] = -1
        codes = number[np.append(numbers_of(trimmed.indices), -1)].astype(np.int32)[with_nan(found.indices, -1)]
        return cls(codes, trimmed.dictionary.filter(pc.invert(absent)))

    @classmethod
    def each(cls, texts: Iterable[str]) -> Words:
        """Return texts unchanged."""
        numbers: dict[str, int] = {}
        return cls(np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int32), list(numbers))

    @cached_property
    def texts(self) -> list[str]:
        """The distinct words."""
        texts: list[str] = self._words if isinstance(self._words, list) else self._words.to_pylist()
        return texts

    @cached_property
    def words(self) -> pa.StringArray:
        """The distinct words, for pyarrow's functions."""
        return strings(self._words) if isinstance(self._words, list) else self._words

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice | np.ndarray) -> Words:
        return Words(self.codes[rows], self._words)


Block = tuple[Sequence[str], Callable[[slice], "Cells"]]


class Places(NamedTuple):
    """The places of a table's rows, for messages: the file, and their lines or, without lines, their numbers."""

    source: str
    numbers: np.ndarray  # (n,)
    are_lines: bool

    def __call__(self, row: int) -> str:
        """Return the place of a row."""
        number = int(self.numbers[row])
        return f"{self.source}:{number}" if self.are_lines else f"{self.source}, row {number + 1}"


class Cells:
    """Columns of a table: float64 (n,), NaN where a number is missing, parts of dates (n, k), or words; and the places of rows.

    `numbers` (n,) are the rows' numbers in the table as read, from 0; `lines` has their lines.
    """

    def __init__(
        self, columns: Mapping[str, np.ndarray | Words], source: str, lines: Callable[[np.ndarray], np.ndarray] | None = None,
        numbers: np.ndarray | None = None, keys: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.columns, self.source, self.lines = columns, source, lines
        self.numbers = np.arange(len(self)) if numbers is None else numbers
        self._keys = keys

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows: slice | np.ndarray) -> Cells:
        """Return some rows, by a slice or a mask."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        keys = None if self._keys is None else self._keys[rows]
        return Cells(columns, self.source, self.lines, self.numbers[rows], keys)

    def subset(self, indices: torch.Tensor) -> Cells:
        """Return some rows (n,)."""
        return self[indices.numpy()]

    def place(self, row: int) -> str:
        """Return the place of a row, for messages: its file and line."""
        return self[row : row + 1].places()(0)

    def these(self, wrong: np.ndarray) -> str:
        """Return the places of a mask's rows, for messages: at most MOST_TOLD, and the number of the others."""
        first, *others = wrong.nonzero()[0][:MOST_TOLD].tolist()
        lines = [re.split(r":|, row ", self.place(row))[-1] for row in others]
        left = int(wrong.sum()) - 1 - len(others)
        return ", ".join([self.place(first), *lines]) + (f" and {left:,} more" if left else "")

    def places(self) -> Places:
        """Return the places of the rows."""
        if self.lines is not None:
            with suppress(DataError):  # quotes that Arrow reads differently
                return Places(self.source, self.lines(self.numbers), True)
        return Places(self.source, self.numbers, False)

    def keys(self) -> np.ndarray:
        """Return a number (n,) uint64 for each row by its content, in any order of columns and rows."""
        if self._keys is not None:
            return self._keys
        total = np.zeros(len(self), np.uint64)
        for name, values in self.columns.items():
            if isinstance(values, Words):
                total += _mixed(hash_of([*values.texts, ""])[values.codes] ^ hash_of([name]))
                continue
            for part, numbers in enumerate(values.reshape(len(values), -1).T):
                bits = np.where(np.isnan(numbers), np.nan, numbers + 0.0).view(np.uint64)
                total += _mixed(bits ^ hash_of([f"{name}.{part}"]))
        self._keys = _mixed(total)
        return self._keys

    def fractions(self) -> np.ndarray:
        """Return a number in [0, 1) for each row, a hash of its content, independent of added or moved rows."""
        return np.asarray((self.keys() >> 11) / 2**53)


def _mixed(bits: np.ndarray) -> np.ndarray:
    """Return splitmix64 of numbers (n,) uint64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))


def absent(values: np.ndarray | Words) -> np.ndarray:
    """Return which values are missing, bool (n,)."""
    missing: np.ndarray = values.codes < 0 if isinstance(values, Words) else np.isnan(values.reshape(len(values), -1)[:, 0])
    return missing


def strings(texts: Collection[str]) -> pa.StringArray:
    """Return texts as an array. `pyarrow.array` would import pandas if it is installed."""
    encoded = [text.encode(errors="surrogatepass") for text in texts]
    ends = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    return pa.StringArray.from_buffers(len(encoded), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))


def numbers_of(array: pa.Array) -> np.ndarray:
    """Return an array's numbers or truths, arbitrary for missing ones. `to_numpy` would import pandas."""
    if pa.types.is_boolean(array.type):
        return _bits(array, 1)
    values: Any = {64: {True: np.float64, False: np.int64}, 32: {False: np.int32}}
    kind = values[array.type.bit_width][pa.types.is_floating(array.type)]
    return np.frombuffer(array.buffers()[1] or b"", kind)[array.offset : array.offset + len(array)]


def _bits(array: pa.Array, buffer: int) -> np.ndarray:
    packed = np.frombuffer(array.buffers()[buffer] or b"", np.uint8)
    return np.unpackbits(packed, bitorder="little")[array.offset : array.offset + len(array)].astype(bool)


def with_nan(array: pa.Array, missing: float = float("nan")) -> np.ndarray:
    """Return an array's numbers, NaN or another number where one is missing."""
    return np.where(_bits(array, 0), numbers_of(array), missing) if array.null_count else numbers_of(array)

"""Reads the files of a data set, which anyone may have made: ordinary files of a bounded size."""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from drivetrain.core.errors import DataError, UserError
from drivetrain.data.decoding import DAMAGED

BYTES_OF_PIXEL = 16  # at most, in any format: four channels of four bytes
HEADER_BYTES = 1 << 20  # beside the pixels
MOST_LINE = 1 << 24  # characters of one line of a table or of texts
MOST_WHOLE = 1 << 30
FEW_CLASSES = 1000  # so many are believed whatever the number of samples


@contextlib.contextmanager
def as_kept(name: str) -> Iterator[None]:
    """A context that reads a file which a run keeps for its data. A ValueError is raised as a UserError that names the file."""
    try:
        yield
    except UserError:  # it is a ValueError too, and says by itself what is wrong
        raise
    except ValueError as error:
        raise UserError(f"the run's {name} is not what drivetrain wrote there: {error}") from None


def read_image_file(path: str | Path, max_pixels: int) -> bytes:
    """Read an image file. Raises DataError for one that cannot be read or is too large for `max_pixels`, a FIFO and a device.

    A FIFO would be waited for, and a device has no end.
    """
    most = BYTES_OF_PIXEL * max_pixels + HEADER_BYTES
    with _opened(path, DAMAGED) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise DataError(
                f"{path} has {size:,} bytes, more than an image of data.max_pixels={max_pixels} can have: mend or "
                "remove it, or raise data.max_pixels"
            )
        return file.read(size)  # a larger number would take so much memory, whatever is read


def read_whole(path: Path, most: int = MOST_WHOLE) -> bytes:
    """Read a file that is held in memory whole. Raises DataError, also where it has more than `most` bytes."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise DataError(f"{path} has {size:,} bytes, and at most {most:,} are read: it is not the file it should be")
        return file.read(size)


def lines_of(path: Path, newline: str | None = None, encoding: str = "utf-8") -> Iterator[str]:
    """Yield the lines of a text file. Raises DataError for one that does not end: a file of zeros is a single line."""
    with _opened(path) as file, io.TextIOWrapper(file, encoding=encoding, newline=newline) as text:
        while line := text.readline(MOST_LINE):
            if len(line) == MOST_LINE:
                raise DataError(f"{path} has a line of more than {MOST_LINE:,} characters: it is not the file it should be")
            yield line


@contextlib.contextmanager
def _opened(
    path: str | Path, damaged: str = "cannot be read ({}): mend it, or set the path of the data"
) -> Iterator[BufferedReader]:
    """Open an ordinary file. Raises DataError."""
    try:
        with open(path, "rb", opener=ordinary) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} {damaged.format(error.strerror)}") from None


def ordinary(path: str | Path, flags: int) -> int:
    """Open an ordinary file or a link to one, as `open` wants it of an opener. Raises OSError, DataError for anything else."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path} is no ordinary file (a pipe, a device or a folder): remove it")
    return descriptor


def number_of_classes(highest: int, samples: int, classes: int | None, where: str) -> int:
    """Return the number of classes by the highest label. Raises DataError for one that is beyond what the data can have.

    A single wrong label would otherwise make a model with as many outputs.
    """
    found = highest + 1
    if classes is not None and found > classes:
        raise DataError(f"data.classes={classes}, but there are labels up to {highest}: raise it to {found} or more")
    if classes is None and found > max(FEW_CLASSES, samples):
        raise DataError(
            f"{where} has the label {highest:,} in {samples:,} samples: mend it, or set data.classes, if there are so many"
        )
    return classes or found

"""Reads the files of a data set, which anyone may have made: ordinary files of a bounded size."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from drivetrain.core.errors import DataError
from drivetrain.data.decoding import DAMAGED

BYTES_OF_PIXEL = 16  # at most, in any format: four channels of four bytes
HEADER_BYTES = 1 << 20  # beside the pixels
FEW_CLASSES = 1000  # so many are believed whatever the number of samples


def read_image_file(path: Path, max_pixels: int) -> bytes:
    """Read an image file. Raises DataError for one that cannot be read or is too large for `max_pixels`, a FIFO and a device.

    A FIFO would be waited for, and a device has no end.
    """
    most = BYTES_OF_PIXEL * max_pixels + HEADER_BYTES
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise DataError(f"{path} is no ordinary file (a pipe, a device or a folder): remove it")
            if about.st_size > most:
                raise DataError(
                    f"{path} has {about.st_size:,} bytes, more than an image of data.max_pixels={max_pixels} can have: mend or "
                    "remove it, or raise data.max_pixels"
                )
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(about.st_size)  # a larger number would take so much memory, whatever is read
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"{path} {DAMAGED.format(error.strerror)}") from None


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

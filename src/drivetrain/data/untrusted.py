"""Reads the files of a data set, which anyone may have made: ordinary files of a bounded size."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import lzma
import math
import mmap
import os
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator
from io import BufferedReader
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Annotated

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import pyarrow as pa
from drivetrain.core.options.allowed import Text
from drivetrain.core.typed import JsonObject
from drivetrain.data.decoding import DAMAGED

Content = bytes | mmap.mmap  # of a file
BYTES_OF_PIXEL = 16  # at most, in any format: four channels of four bytes
HEADER_BYTES = 1 << 20  # in addition to the pixels
MOST_LINE = 1 << 24  # characters of one line of a table or of texts
MOST_WHOLE = 1 << 30
MOST_GROWTH = 2**16  # times that a tokenizer may lengthen a text before it splits it into tokens
MAPPED = 32 << 20  # bytes of a file that a process keeps mapped, about: pages that were read count as its memory
FEW_CLASSES = 1000  # accepted with any number of samples
Encoding = Annotated[str, Text(r"[A-Za-z0-9_-]{1,20}", "an encoding, such as latin-1")]
SAVE_AS_UTF8 = "save the file as UTF-8, or set data.encoding to its encoding (latin-1, cp1252, cp1250, …)"
BOMS = (  # the longer ones first
    (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip
PACKED = ((b"\x1f\x8b", "gzip"), (b"BZh", "bz2"), (b"\xfd7zXZ", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"))


@contextlib.contextmanager
def as_kept(name: str) -> Iterator[None]:
    """A context that reads a file which a run keeps for its data. A ValueError is raised as a UserError that names the file."""
    try:
        yield
    except UserError:  # it is a ValueError too, and its message is enough
        raise
    except ValueError as error:
        raise UserError(f"the run's {name} is not what drivetrain wrote there: {error}") from None


def read_image_file(path: str | Path, max_pixels: int) -> bytes:
    """Read an image file. Raises DataError for one that cannot be read or is too large for `max_pixels`, a FIFO and a device.

    A read of a FIFO would block, and a device has no end.
    """
    most = BYTES_OF_PIXEL * max_pixels + HEADER_BYTES
    with _opened(path, DAMAGED) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise DataError(
                f"{path} has {size:,} bytes, more than an image of data.max_pixels={max_pixels} can have: mend or "
                "remove it, or raise data.max_pixels"
            )
        return file.read(size)  # a larger number would allocate that much memory, whatever is read


def read_whole(path: Path, most: int = MOST_WHOLE) -> bytes:
    """Read a file that is held in memory whole. Raises DataError, also where it has more than `most` bytes."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise DataError(f"{path} has {size:,} bytes, and at most {most:,} are read: it is not the file it should be")
        return file.read(size)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file of any size. Raises DataError."""
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lines_of(path: Path, encoding: str | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a text file in UTF-8, each after its number.

    Raises DataError for a line without an end, such as zeros.
    """
    with _opened(path) as file:
        for number, line in enumerate(utf8_lines(iter(lambda: file.readline(MOST_LINE), b""), encoding, str(path)), 1):
            if len(line) >= MOST_LINE:
                raise no_end(path)
            yield number, line


def no_end(source: object) -> DataError:
    """The error for a text whose line does not end."""
    return DataError(f"{source} has a line of more than {MOST_LINE:,} characters: it is not the file it should be")


def decode(content: bytes | str, source: str, line: int = 1) -> str:
    """Decode some lines, from number `line` on: the decoder of every text. Raises DataError."""
    try:
        text = content if isinstance(content, str) else content.decode()
        text.encode()
    except UnicodeDecodeError as error:
        at = line + error.object[: error.start].count(b"\n")
        raise DataError(f"{source}:{at}: the byte 0x{error.object[error.start]:02x} is no UTF-8: {SAVE_AS_UTF8}") from None
    except UnicodeEncodeError as error:
        raise DataError(f"{source}:{line}: {error.object[error.start]!r} is half of a character: mend the text") from None
    if "\0" in text:
        raise DataError(f"{source}:{line + text[: text.index(chr(0))].count(chr(10))} holds a zero byte: it is no text")
    return text


def bom_of(begin: bytes) -> str | None:
    """The encoding given by the first bytes of a text (its byte order mark)."""
    return next((encoding for mark, encoding in BOMS if begin.startswith(mark)), None)


def as_utf8(content: Content, encoding: str | None, source: str) -> Content:
    """Return the bytes of a text in UTF-8, without a byte order mark; `encoding` is the text's own encoding. Raises DataError."""
    encoding = encoding or bom_of(bytes(content[:4]))
    if encoding in (None, "utf-8-sig"):
        return content[3:] if encoding else content
    try:
        return bytes(content).decode(encoding).removeprefix("\ufeff").encode()
    except (UnicodeError, LookupError) as error:
        raise DataError(f"{source} is no text in {encoding} ({error}): set data.encoding to its encoding") from None


def utf8_lines(lines: Iterable[bytes], encoding: str | None, source: str) -> Iterator[bytes]:
    """Yield the lines of a text in UTF-8, split as an editor splits them. Raises DataError."""
    lines = iter(lines)
    first = next(lines, b"")
    if (encoding or bom_of(first)) not in (None, "utf-8-sig"):  # a line may end within a character
        first, lines = bytes(as_utf8(b"".join((first, *lines)), encoding, source)), iter(())
    for line in chain([bytes(as_utf8(first, None, source))], lines):
        body = line.removesuffix(b"\n").removesuffix(b"\r")
        yield from line.splitlines(keepends=True) if b"\r" in body or b"\n" in body else [line] if line else ()


def mapped(path: Path) -> Content:
    """Return the bytes of a file, mapped: they are read when they are used. Raises DataError."""
    with _opened(path) as file:
        if not os.fstat(file.fileno()).st_size:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def let_go(content: object) -> None:
    """Release the memory of a mapped file's pages; they stay in the system's file cache."""
    if isinstance(content, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        content.madvise(mmap.MADV_DONTNEED)


def unpacked(content: Content, path: Path) -> Content:
    """Return the bytes of a file that may be packed by gzip, bzip2, xz or zstd. Raises DataError for more than MOST_WHOLE."""
    begin = bytes(content[:6])
    packing = next((name for mark, name in PACKED if begin.startswith(mark)), None)
    if packing is None:
        return content
    if packing == "xz":
        found = lzma.LZMADecompressor().decompress(content, MOST_WHOLE + 1)
    else:
        found = pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(content)), packing).read(MOST_WHOLE + 1)
    if len(found) > MOST_WHOLE:
        raise DataError(f"{path} holds more than {MOST_WHOLE:,} bytes when it is unpacked: unpack it yourself")
    return found


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


def check_member(archive: object, member: tarfile.TarInfo) -> None:
    """Raise DataError for a tar member that is a link or a device, or whose path leads out of the archive."""
    path = PurePosixPath(member.name)
    if member.issym() or member.islnk():
        problem = "is a link"
    elif path.is_absolute() or ".." in path.parts:
        problem = "points out of the archive"
    elif not (member.isfile() or member.isdir()):
        problem = "is neither a file nor a folder"
    else:
        return
    raise DataError(f"{archive}: its member {member.name!r} {problem}, which no data set needs: refused")


def number_of_classes(highest: int, samples: int, classes: int | None, where: str) -> int:
    """Return the number of classes by the highest label. Raises DataError for one that is beyond what the data can have.

    Otherwise a single wrong label would set the number of the model's outputs.
    """
    found = highest + 1
    if classes is not None and found > classes:
        raise DataError(f"data.classes={classes}, but there are labels up to {highest}: raise it to {found} or more")
    if classes is None and found > max(FEW_CLASSES, samples):
        raise DataError(
            f"{where} has the label {highest:,} in {samples:,} samples: mend it, or set data.classes, if there are so many"
        )
    return classes or found


def growth(part: JsonObject | list[JsonObject]) -> float:
    """How many times a part of a tokenizer may lengthen a text: each of its steps may double the output of the one before."""
    if isinstance(part, list):
        return math.prod(map(growth, part))
    if part["type"] == "Sequence":
        return growth(part.get("normalizers") or part.get("decoders") or [])
    if part["type"] not in ("Replace", "Prepend"):
        return 1.0
    pattern = part.get("pattern", {"String": "a"})
    between = re.search(r"[*?|^$(\\{]", pattern.get("Regex", "")) or "" in pattern.values()  # two letters, which stay
    return max(1.0, len(str(part.get("content", part.get("prepend")))) / max(1, len(pattern.get("String", ""))) + bool(between))

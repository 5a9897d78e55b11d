"""Opens, reads and writes the files of a run: only ordinary files of a plausible size.

A run's directory may be anybody's, or may change while the run trains. A link in it could lead to a file elsewhere, a FIFO would
block its reader for ever, and /dev/zero has no end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader, BufferedWriter, TextIOWrapper
from pathlib import Path
from typing import IO, Any, Literal, overload

MB = 2**20
SMALL = 2**16  # bytes; the kernel's files report a size of 0
LARGEST = 64 * MB  # of files read whole: configs, records, results, manifests
DEEPEST, MOST_EVENTS = 64, 50_000  # levels of a YAML file, and its values with the beginnings and ends of lists
MOST_JSON = 10**6  # lists, mappings and keys of a JSON file
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))  # Windows has none of them


def descriptor(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Open an ordinary file, as `open` wants it of an opener. Raises OSError for a link, a FIFO, a device or a folder."""
    try:
        handle = os.open(path, flags | _FLAGS, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads, or a socket
            raise OSError(errno.ENXIO, "it is no ordinary file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
    return handle


@contextlib.contextmanager
def mode_of_umask(path: Path) -> Iterator[Path]:
    """A context in which a library writes this file with the umask's permissions; safetensors allows only its owner."""
    handle = descriptor(path, os.O_CREAT | os.O_WRONLY)
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    os.close(handle)
    yield path
    path.chmod(mode)


@overload
def opened(path: Path, mode: Literal["r", "w", "a", "x"] = "r", newline: str | None = None) -> TextIOWrapper: ...


@overload
def opened(path: Path, mode: Literal["rb"]) -> BufferedReader: ...


@overload
def opened(path: Path, mode: Literal["wb", "ab"]) -> BufferedWriter: ...


def opened(path: Path, mode: str = "r", newline: str | None = None) -> IO[str] | IO[bytes]:
    """Open an ordinary file; text is UTF-8, whatever the locale. Raises OSError."""
    return open(path, mode, encoding=None if "b" in mode else "utf-8", newline=newline, opener=descriptor)


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """Read an ordinary file. Raises OSError, also where it is larger than `most` bytes."""
    with opened(path, "rb") as file:
        size = max(os.fstat(file.fileno()).st_size, SMALL)
        content = file.read(size + 1) if size <= max(most, SMALL) else None  # this allocates the memory at once
    if content is None or len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most // MB} MB", str(path))
    return content


def read_text(path: Path, most: int = LARGEST) -> str:
    """Read an ordinary file of UTF-8 text. Raises OSError, and ValueError where it is none."""
    return read_bytes(path, most).decode()


def read_json(path: Path, most: int = LARGEST) -> Any:
    """Read a JSON file. Raises OSError, and ValueError where it is none, nested too deep, or has too many lists and keys.

    In memory a list takes up to 40 times its bytes in the file.
    """
    return parse_json(read_text(path, most))


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError, also where it is nested too deep, or has too many lists and keys."""
    if sum(map(text.count, "[{:")) > MOST_JSON:
        raise ValueError("it has too many lists and keys")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_yaml(path: Path, most: int = LARGEST) -> Any:
    """Read a YAML file of plain values. Raises OSError, and ValueError where it is none, nested too deep or has aliases.

    Tree loaders recurse at each level, and the one in C is limited only by the stack.
    """
    import yaml

    loader, text = getattr(yaml, "CSafeLoader", yaml.SafeLoader), read_text(path, most)
    try:
        depth = 0
        for number, event in enumerate(yaml.parse(text, Loader=loader)):
            if number > MOST_EVENTS:
                raise ValueError("it has too many values")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST or isinstance(event, yaml.AliasEvent):
                raise ValueError("it is nested too deep" if depth > DEEPEST else "it has aliases")
        return yaml.load(text, loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from None


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """A context for one process of a machine at a time, while others wait; `path` is the lock's file. Raises OSError."""
    with opened(path, "ab") as file:
        locks(file, wait=True)
        yield


def locks(file: IO[str] | IO[bytes], wait: bool = False, shared: bool = False) -> bool:
    """Lock an open file until it is closed. Return False where another process has locked it, or the disk has no locks."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 text, as `write_bytes` does."""
    write_bytes(path, text.encode())


@contextlib.contextmanager
def beside(path: Path, mode: int = 0o666) -> Iterator[tuple[BufferedWriter, Path]]:
    """Open a new file in the folder of another, locked, until the context ends. Files left by killed processes are removed."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.writing-????????"):
        with contextlib.suppress(OSError), opened(left, "ab") as file:
            if locks(file):
                left.unlink()
    temporary = path.with_name(f".{path.name}.writing-{os.urandom(4).hex()}")
    try:
        with open(temporary, "xb", opener=lambda name, flags: descriptor(name, flags, mode)) as file:
            locks(file, wait=True)
            if os.fstat(file.fileno()).st_nlink:
                yield file, temporary
                return
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    with beside(path, mode) as again:  # another process took it for a left one before it was locked
        yield again


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole: to a temporary file, which is synced and renamed. A file or link at the path is replaced."""
    try:
        with beside(path) as (file, temporary):
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    except OSError as error:  # a full disk's error names no file
        error.filename = error.filename or str(path)
        raise


def remove(path: Path) -> None:
    """Remove whatever is at a path, as far as possible. Only folders are opened: opening a FIFO would block."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def folder_in(run_dir: Path, name: str) -> Path:
    """Return a folder of a run's directory, made if it is missing. Raises OSError where it is a link, which leads outside."""
    folder = run_dir / name
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def place_for(path: Path) -> Path:
    """Return the path for a file that a library writes into a folder of a run. Raises OSError where the folder is a link.

    A link at the path itself is removed: the library would follow it.
    """
    folder_in(path.parents[1], path.parent.name)
    if path.is_symlink():
        path.unlink()
    return path


def write_json(path: Path, content: object) -> None:
    """Write JSON to a temporary file, sync it and rename it: a reader sees the whole content or none."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")

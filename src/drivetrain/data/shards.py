"""Tar shards: their names spelled out, an index of what lies where in each, and reading a sample by its place."""

from __future__ import annotations

import glob
import hashlib
import io
import itertools
import json
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from drivetrain.core.errors import DataError, UserError
from drivetrain.data.archive import refuse_member
from drivetrain.data.bad_samples import Unreachable
from drivetrain.data.images import IMAGES

MOST_SHARDS = 100_000
MOST_LABEL = 1 << 20  # bytes of a label's file
BLOCK = 4 << 20  # bytes of one request while a remote shard is scanned
TRIES = 3
VERSION = 1
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}")


class Index(NamedTuple):
    """What lies in a shard."""

    names: Any  # (n,) array of text: what a sample's files have in common
    places: Any  # (n, 2) int64: offset and size of the image
    labels: Any  # (n,) int64


def expand(pattern: str) -> list[str]:
    """The shards that a pattern names: {000..009}, {a,b}, and, on local disks, * and ?. Raises UserError if there are none."""
    spelled = list(itertools.islice(_expanded(os.path.expanduser(pattern)), MOST_SHARDS + 1))
    if len(spelled) > MOST_SHARDS:
        raise UserError(f"{pattern} names more than {MOST_SHARDS:,} shards: that is a slip of the pen")
    shards = []
    for name in spelled:
        shards += sorted(glob.glob(name)) if not is_remote(name) and glob.has_magic(name) else [name]
    if not shards:
        raise UserError(f"{pattern} names no shard that there is")
    return shards


def _expanded(pattern: str) -> Iterator[str]:
    match = _RANGE.search(pattern)
    if match is None:
        yield pattern
        return
    first, last, listed = match.groups()
    inner = listed.split(",") if listed else (f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1))
    for part in inner:
        yield from _expanded(pattern[: match.start()] + part + pattern[match.end() :])


def is_remote(shard: str) -> bool:
    """Whether a shard is fetched by http."""
    return shard.startswith(("http://", "https://"))


def read(shard: str, start: int, size: int) -> bytes:
    """`size` bytes of a shard from `start`. Raises DataError; Unreachable where the network is to blame."""
    if is_remote(shard):
        return _requested(shard, start, size)[0]
    try:
        with open(shard, "rb", buffering=0) as file:
            content = os.pread(file.fileno(), size, start)
    except OSError as error:
        raise DataError(f"{shard} cannot be read ({error.strerror})") from None
    if len(content) != size:
        raise DataError(f"{shard} ends before byte {start + size:,}: it was cut after it was indexed")
    return content


def _requested(url: str, start: int, size: int) -> tuple[bytes, int, str]:
    """A range of a remote file, the file's size, and what changes when it does. Raises Unreachable."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    said = ""
    for _ in range(TRIES):
        try:
            request = Request(url, headers={"Range": f"bytes={start}-{start + size - 1}"})
            with urlopen(request, timeout=60) as response:
                if response.status != 206:
                    raise Unreachable(f"{url} knows no ranges: put it on a server that does, or copy it here")
                total = int(response.headers["Content-Range"].rpartition("/")[2])
                stamp = response.headers["ETag"] or response.headers["Last-Modified"] or ""
                content = response.read(size + 1)  # and no more, whatever the server sends
            if len(content) == min(size, total - start):
                return content, total, stamp
            said = f"{len(content)} of {size} bytes came"
        except (OSError, HTTPException, ValueError, TypeError) as error:
            if isinstance(error, Unreachable):
                raise
            said = str(error)
            if isinstance(error, HTTPError) and error.code < 500:
                break
    raise Unreachable(f"{url} cannot be fetched ({said})")


class _Remote(io.RawIOBase):
    """A remote file to seek in, read a block at a time."""

    def __init__(self, url: str, size: int) -> None:
        self.url, self.size, self.at = url, size, 0
        self._block, self._start = b"", 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        if self.at >= self.size:
            return 0
        if not self._start <= self.at < self._start + len(self._block):
            self._block, self._start = read(self.url, self.at, min(BLOCK, self.size - self.at)), self.at
        piece = self._block[self.at - self._start :][: len(buffer)]
        buffer[: len(piece)] = piece
        self.at += len(piece)
        return len(piece)


def indexed(shard: str, cache: Path) -> Index:
    """A shard's index: the one kept in `cache`, else scanned and kept. Raises DataError naming the shard and the member."""
    import numpy as np

    size, stamp = _stamp(shard)
    known = json.dumps([VERSION, shard if is_remote(shard) else os.path.abspath(shard), size, stamp])
    kept = cache / f"{hashlib.sha256(known.encode()).hexdigest()[:32]}.npz"
    try:
        with np.load(kept, allow_pickle=False) as arrays:
            index = Index(arrays["names"], arrays["places"], arrays["labels"])
        if _is_whole(index, size):
            return index
    except (OSError, ValueError, KeyError, EOFError):
        pass
    except Exception as error:  # a zip of numpy's that is damaged can fail in its own ways
        if type(error).__module__ not in ("zipfile", "zlib"):
            raise
    index = scan(shard, size)
    _keep(kept, index)
    return index


def _is_whole(index: Index, size: int) -> bool:
    n = len(index.names)
    whole = index.places.shape == (n, 2) and index.labels.shape == (n,) and n > 0
    return bool(whole and index.places.min() >= 0 and index.places.sum(1).max() <= size)


def _keep(kept: Path, index: Index) -> None:
    """Keep an index; where that cannot be, the next run scans again."""
    import contextlib

    import numpy as np

    temporary = kept.with_name(f".{kept.stem}.{os.getpid()}.npz")
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.savez(temporary, names=index.names, places=index.places, labels=index.labels)
        temporary.replace(kept)


def _stamp(shard: str) -> tuple[int, str]:
    """A shard's size in bytes, and what changes when it does."""
    if is_remote(shard):
        return _requested(shard, 0, 1)[1:]
    try:
        about = os.stat(shard)
    except OSError as error:
        raise DataError(f"{shard} cannot be read ({error.strerror}): correct data.train or data.test") from None
    return about.st_size, str(about.st_mtime_ns)


def scan(shard: str, size: int) -> Index:
    """A shard read header by header. Raises DataError naming the member that a data set should not have."""
    import numpy as np

    images: dict[str, tuple[int, int]] = {}
    given: dict[str, dict[str, int]] = {".json": {}, ".cls": {}}
    end = 0
    try:
        with _opened(shard, size) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                refuse_member(shard, member)
                if member.issparse():
                    raise DataError(f"{shard}: its member {member.name!r} is sparse: refused")
                end = member.offset_data + -(-member.size // 512) * 512
                if member.isfile():
                    _sort_in(shard, tar, member, images, given)
                tar.members = []  # type: ignore[attr-defined] # it would keep them all
            file.seek(end)
            if file.read(512) != bytes(512):
                raise tarfile.ReadError("it has no end")
    except (OSError, tarfile.TarError, EOFError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        why = "it is compressed" if shard.endswith(("gz", "bz2", "xz", "zst")) else str(error)
        raise DataError(f"{shard} is cut short or no plain tar archive ({why}): mend or remove it") from None
    labels = given[".json"] | given[".cls"]
    if not images:
        raise DataError(f"{shard} holds no image ({' '.join(IMAGES)}): mend or remove it")
    if alone := sorted(set(images) ^ set(labels)):
        lacks = "label (.cls or .json)" if alone[0] in images else "image"
        raise DataError(f"{shard}: sample {alone[0]!r} has no {lacks}: mend the shard")
    return Index(
        np.array(list(images)), np.array(list(images.values()), np.int64), np.array([labels[n] for n in images], np.int64)
    )


def _opened(shard: str, size: int) -> Any:
    return io.BufferedReader(_Remote(shard, size), 1 << 16) if is_remote(shard) else open(shard, "rb")


def _sort_in(shard: str, tar: Any, member: Any, images: dict[str, tuple[int, int]], given: dict[str, dict[str, int]]) -> None:
    """A member to the images or the labels by its ending; others are no concern of ours."""
    path = PurePosixPath(member.name)
    stem, _, ending = path.name.partition(".")
    name, ending = str(path.with_name(stem or path.name)), f".{ending.lower()}"
    if (ending in IMAGES and name in images) or name in given.get(ending, ()):
        raise DataError(f"{shard}: sample {name!r} is there twice ({member.name!r}): mend the shard")
    if ending in IMAGES:
        images[name] = member.offset_data, member.size
    elif ending in given:
        if member.size > MOST_LABEL:
            raise DataError(f"{shard}: {member.name!r} has {member.size:,} bytes, which is no label")
        label = _label(tar.extractfile(member).read(), ending)
        if label is not None:
            given[ending][name] = label
        elif ending == ".cls":
            raise DataError(f"{shard}: {member.name!r} is no label: it wants a whole number from 0 on")


def _label(content: bytes, ending: str) -> int | None:
    """A class number, of .cls: the number; of .json: the number itself or that under label, cls or class."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if ending == ".json" and isinstance(value, dict):
        value = next((value[key] for key in ("label", "cls", "class") if key in value), None)
    return value if type(value) is int and 0 <= value < 2**31 else None

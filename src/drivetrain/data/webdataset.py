"""Images in tar shards, on local disks or on a web server: their names, an index of each, and a sample's bytes by its offset."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import itertools
import json
import logging
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from drivetrain.core.errors import DataError, OperatorGives, UserError
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.machine import files
from drivetrain.core.machine.paths import user_cache
from drivetrain.core.options.allowed import FileName
from drivetrain.core.options.option import Count, RunSpec
from drivetrain.core.order import Sampling
from drivetrain.core.step import rng
from drivetrain.core.step.source import CropBox
from drivetrain.data.base import SPLITS, Fraction, HeldOut, Sets, Splits, hash_fractions
from drivetrain.data.decoding import ImageFileSource, NetworkError
from drivetrain.data.images import IMAGES, PictureData
from drivetrain.data.target_reader import TargetReader
from drivetrain.data.untrusted import check_member, ordinary

MAX_CONCURRENT = 16  # shards scanned, or samples fetched from a web server, at once
REMOTE_LOOKED_AT = 8  # samples on a web server that are read for the range of pixels
MIN_SHARDS = 10  # from this number on whole shards are held out
logger = logging.getLogger(__name__)
SHUFFLE_STREAM = 1000  # the random stream of the shuffle within windows; augmentations' streams lie below


@dataclass(kw_only=True, eq=False)
class WebDataset(PictureData, HeldOut["ShardImages", None, "ShardImages"]):
    """Tar shards in WebDataset's layout (Aizman et al. 2019): files that share a name up to its first dot are a sample.

    Each shard is indexed once, and samples are read by their offsets. So the order is a function of seed and epoch alone,
    ranks and workers share it exactly, and a resumed run continues it. Shards are shuffled, then the samples within windows
    of `buffer`, so that samples near each other in a shard are read near each other in time.
    """

    machine_local_keys = ("train", "test", "cache")

    train: str | None = None
    test: str | dict[str, str] | None = None
    validation: Fraction | FileName | Sets | None = 0.1
    classes: Count | None = None
    buffer: Count = 10_000
    cache: str | None = None
    order: Sampling = "own"

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not self.train:
            yield OperatorGives("data=webdataset needs data.train, its shards, such as 'data.train=\"train-{000..009}.tar\"'")
        given = [("train", self.train), *((split, each) for split in SPLITS for each in self.places(split).values())]
        for setting, pattern in given:
            try:
                names = expand(pattern) if pattern else []
            except UserError as error:
                yield f"data.{setting}: {error}"
                continue
            missing = [name for name in names if not is_remote(name) and not os.path.isfile(name)]
            if missing:
                yield f"data.{setting}={pattern}: {missing[0]} is no file ({len(missing)} of {len(names)} shards are not there)"

    def places(self, split: str, known: None = None) -> dict[str, str]:
        """Return the shards of a split's sets; validation shards are in the folder of the training shards."""
        found, folder = super().places(split), str(self.train).rpartition("/")[0]
        return found if split == "test" else {name: os.path.join(folder, each) for name, each in found.items()}

    def read(self) -> tuple[ShardImages, None]:
        return self.read_set(str(self.train), None, "train"), None

    def fractions(self, every: ShardImages) -> np.ndarray:
        return hash_fractions(every.table.names, len(every.table.names))

    def read_set(self, place: str, known: None, split: str) -> ShardImages:
        cache = Path(os.path.expanduser(self.cache)) if self.cache else (user_cache() or Path(os.devnull)) / "shards"
        return ShardImages(SampleTable.load(expand(place), cache), self)

    def about(self, known: None, sources: Sequence[tuple[str, ShardImages]], own: Splits | None) -> dict[str, object]:
        reader = TargetReader("class", ["label"], f"data.train={self.train}", numbered=True)
        return {"shape": self.shape(), **reader.about(sources, self.classes), **self.looked_at(sources)}


class SampleTable(NamedTuple):
    """The n samples of some shards, in their order."""

    files: list[str]  # the shards
    names: np.ndarray  # (n,) of text
    shard: torch.Tensor  # (n,) int64: each sample's shard, as a position in `files`
    spans: torch.Tensor  # (n, 2) int64: offset and size of its image
    labels: torch.Tensor  # (n,) int64

    @classmethod
    def load(cls, files: list[str], cache: Path) -> SampleTable:
        """Load the indices of these shards. Raises DataError naming the first bad shard."""
        with ThreadPoolExecutor(MAX_CONCURRENT) as pool:  # scanning waits for the disk or the network
            indices = list(pool.map(lambda shard: load_index(shard, cache), files))
        if empty := [file for file, index in zip(files, indices, strict=True) if not index.names]:
            logger.warning(
                "%d of %d shards hold no samples and are passed over, the first is %s", len(empty), len(files), empty[0]
            )
        names = np.array([name for index in indices for name in index.names])
        shard = torch.arange(len(files)).repeat_interleave(torch.tensor([len(index.names) for index in indices]))
        spans, labels = (torch.from_numpy(np.concatenate([index[i] for index in indices])) for i in (1, 2))
        return cls(files, names, shard, spans, labels)

    def select(self, chosen: torch.Tensor) -> SampleTable:
        """Return the table of the samples `chosen` (m,)."""
        return SampleTable(self.files, self.names[chosen.numpy()], self.shard[chosen], self.spans[chosen], self.labels[chosen])


class ShardImages(ImageFileSource):
    """Images in tar shards as a source."""

    def __init__(self, table: SampleTable, data: WebDataset) -> None:
        self.table, self.buffer = table, data.buffer
        self.remote = any(map(is_remote, table.files))
        self.looked_at = REMOTE_LOOKED_AT if self.remote else self.looked_at
        super().__init__(data.how(), table.labels)

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        """Return the epoch's order (n,): shards are shuffled, then samples within windows of `buffer`.

        The windows shift every epoch.
        """
        n = len(self)
        rank = rng.permutation(rng.mix(seed, 6), epoch, len(self.table.files)).argsort()
        by_shard = rank[self.table.shard].argsort(stable=True)
        shift = rng.mix(seed, epoch, 7) % self.buffer
        window = (torch.arange(n) + shift) // self.buffer
        draws = rng.uniform(seed, epoch, torch.arange(n), SHUFFLE_STREAM).double()
        return by_shard[(window + draws).argsort(stable=True)]

    def samples(self, indices: list[int], boxes: Sequence[CropBox | None]) -> Iterable[tuple[torch.Tensor, int]]:
        if not self.remote:
            return super().samples(indices, boxes)
        with ThreadPoolExecutor(min(MAX_CONCURRENT, len(indices))) as pool:
            return list(pool.map(self.sample, indices, boxes))

    def select(self, indices: torch.Tensor) -> None:
        super().select(indices)
        self.table = self.table.select(indices)

    def identities(self) -> list[str]:
        """Return each sample's shard, so that whole shards are held out; with too few shards, each sample's own name."""
        files = [os.path.basename(file) for file in self.table.files]
        if len(files) >= MIN_SHARDS:
            return [files[shard] for shard in self.table.shard.tolist()]
        return [str(name) for name in self.table.names]

    def content(self, index: int) -> bytes:
        start, size = self.table.spans[index].tolist()
        return read_range(self._file(index), start, size)

    def name(self, index: int) -> str:
        return f"{self._file(index)}: {self.table.names[index]}"

    def _file(self, index: int) -> str:
        return self.table.files[int(self.table.shard[index])]


MAX_SHARDS = 100_000
MAX_WILD_FOLDERS = 1  # matched by * or ? in a pattern: more could list a whole disk
MAX_LABEL_BYTES = 1 << 20
REQUEST_BYTES = 4 << 20  # of one request while a remote shard is scanned
TRIES = 3
MOST_INDEX = 2**30  # bytes
FORMAT = 2  # of a cached index
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}")


class Index(NamedTuple):
    """The samples of a shard."""

    names: list[str]  # n, the common path of a sample's files
    spans: np.ndarray  # (n, 2) int64: offset and size of the image
    labels: np.ndarray  # (n,) int64


def expand(pattern: str) -> list[str]:
    """List the shards that a pattern names: {000..009}, {a,b}, and, on local disks, * and ?. Raises UserError for none."""
    if (folders := os.path.dirname(pattern)) and sum(map(glob.has_magic, folders.split("/"))) > MAX_WILD_FOLDERS:
        raise UserError(f"{pattern} has a * or ? in the names of several folders: name the folders, or list them as {{a,b}}")
    spelled = list(itertools.islice(_expanded(os.path.expanduser(pattern)), MAX_SHARDS + 1))
    if len(spelled) > MAX_SHARDS:
        raise UserError(f"{pattern} names more than {MAX_SHARDS:,} shards: correct its range")
    shards = []
    for name in spelled:
        is_wild = not is_remote(name) and glob.has_magic(name)
        shards += sorted(itertools.islice(glob.iglob(name), MAX_SHARDS + 1)) if is_wild else [name]
        if len(shards) > MAX_SHARDS:
            raise UserError(f"{pattern} names more than {MAX_SHARDS:,} shards: name fewer")
    if not shards:
        raise UserError(f"{pattern} names no shard that exists")
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
    """True if a shard is fetched by http."""
    return shard.startswith(("http://", "https://"))


def read_range(shard: str, start: int, size: int) -> bytes:
    """Read `size` bytes of a shard from offset `start`. Raises DataError; NetworkError where the server does not deliver."""
    if is_remote(shard):
        return _http_range(shard, start, size)[0]
    try:
        with open(shard, "rb", buffering=0, opener=ordinary) as file:
            content = os.pread(file.fileno(), size, start)
    except OSError as error:
        raise DataError(f"{shard} cannot be read ({error.strerror})") from None
    if len(content) != size:
        raise DataError(f"{shard} ends before byte {start + size:,}: it was cut after it was indexed")
    return content


def _http_range(url: str, start: int, size: int) -> tuple[bytes, int, str]:
    """Fetch a range of a remote file; return the bytes, the file's size and its version (ETag or date). Raises NetworkError.

    Not by fsspec: from a server without ranges its HTTP file system takes the whole file as the range. It neither checks the
    received size nor retries, and it refuses to run in forked loader workers.
    """
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    reason = ""
    for _ in range(TRIES):
        try:
            request = Request(url, headers={"Range": f"bytes={start}-{start + size - 1}"})
            with urlopen(request, timeout=60) as response:
                if response.status != 206:
                    raise NetworkError(f"{url}: the server does not support ranges: use one that does, or copy the shard here")
                total = int(response.headers["Content-Range"].rpartition("/")[2])
                version = response.headers["ETag"] or response.headers["Last-Modified"] or ""
                content = response.read(size + 1)  # a bound, whatever the server sends
            if len(content) == min(size, total - start):
                return content, total, version
            reason = f"{len(content)} of {size} bytes arrived"
        except (OSError, HTTPException, ValueError, TypeError) as error:
            if isinstance(error, NetworkError):
                raise
            reason = str(error)
            if isinstance(error, HTTPError) and error.code < 500:
                break
    raise NetworkError(f"{url} cannot be fetched ({reason})")


class _RemoteFile(io.RawIOBase):
    """A seekable remote file, read in requests of REQUEST_BYTES."""

    def __init__(self, url: str, size: int) -> None:
        self.url, self.size, self.position = url, size, 0
        self._block, self._start = b"", 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        if self.position >= self.size:
            return 0
        if not self._start <= self.position < self._start + len(self._block):
            self._start = self.position
            self._block = read_range(self.url, self._start, min(REQUEST_BYTES, self.size - self._start))
        piece = self._block[self.position - self._start :][: len(buffer)]
        buffer[: len(piece)] = piece
        self.position += len(piece)
        return len(piece)


def load_index(shard: str, cache: Path) -> Index:
    """Read a shard's index from `cache`, or scan the shard and write the index there. Raises DataError.

    An index is a safetensors file. Shards are indexed in threads, and numpy parses the header of an .npy file as Python,
    which is not safe in threads on CPython 3.11.
    """
    import safetensors.numpy
    from safetensors import SafetensorError

    size, version = _size_and_version(shard)
    key = json.dumps([FORMAT, shard if is_remote(shard) else os.path.abspath(shard), size, version])
    path = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
    try:
        arrays = safetensors.numpy.load(files.read_bytes(path, MOST_INDEX))
        names = arrays["names"].tobytes().decode(errors="surrogateescape").split("\0")
        index = Index(names, arrays["spans"], arrays["labels"])
        of_right_kind = {array.dtype.str for array in index[1:]} == {"<i8"}
        of_right_kind &= index.spans.shape == (len(names), 2) and index.labels.shape == (len(names),)
        if of_right_kind and index.spans.min() >= 0 and index.spans.sum(1).max() <= size:
            return index
    except (OSError, ValueError, KeyError, SafetensorError):
        pass  # missing or damaged: scan
    index = scan(shard, size)
    content = "\0".join(index.names).encode(errors="surrogateescape")  # no name in a tar archive has a zero byte
    arrays = {"names": np.frombuffer(content, np.uint8), "spans": index.spans, "labels": index.labels}
    with contextlib.suppress(OSError):  # the next run scans again
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(path, safetensors.numpy.save(arrays))
    return index


def _size_and_version(shard: str) -> tuple[int, str]:
    """A shard's size in bytes, and a text that changes when the shard does."""
    if is_remote(shard):
        return _http_range(shard, 0, 1)[1:]
    try:
        status = os.stat(shard)
    except OSError as error:
        raise DataError(f"{shard} cannot be read ({error.strerror}): correct data.train or data.test") from None
    return status.st_size, str(status.st_mtime_ns)


def scan(shard: str, size: int) -> Index:
    """Index a shard of `size` bytes by its members' headers.

    Raises DataError with the name of a member that no data set may have.
    """
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, dict[str, int]] = {".json": {}, ".cls": {}}
    end = 0
    try:
        with _open(shard, size) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                check_member(shard, member)
                if member.issparse():
                    raise DataError(f"{shard}: its member {member.name!r} is sparse: refused")
                end = member.offset_data + -(-member.size // 512) * 512
                if member.isfile():
                    _add_member(shard, tar, member, images, labels)
                tar.members = []  # type: ignore[attr-defined] # it would keep them all in memory
            file.seek(end)
            if file.read(512) != bytes(512):
                raise tarfile.ReadError("it has no end")
    except (OSError, tarfile.TarError, EOFError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        why = "it is compressed" if shard.endswith(("gz", "bz2", "xz", "zst")) else str(error)
        raise DataError(f"{shard} is cut short or no plain tar archive ({why}): mend or remove it") from None
    label_of = labels[".json"] | labels[".cls"]
    if not images and end:  # an empty archive is one
        raise DataError(f"{shard} holds no image ({' '.join(IMAGES)}): mend or remove it")
    if incomplete := sorted(set(images) ^ set(label_of)):
        lacks = "label (.cls or .json)" if incomplete[0] in images else "image"
        raise DataError(f"{shard}: sample {incomplete[0]!r} has no {lacks}: mend the shard")
    spans, numbers = list(images.values()), [label_of[name] for name in images]
    return Index(list(images), np.array(spans, np.int64).reshape(-1, 2), np.array(numbers, np.int64))


def _open(shard: str, size: int) -> io.BufferedReader:
    return io.BufferedReader(_RemoteFile(shard, size), 1 << 16) if is_remote(shard) else open(shard, "rb", opener=ordinary)


def _add_member(
    shard: str,
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    images: dict[str, tuple[int, int]],
    labels: dict[str, dict[str, int]],
) -> None:
    """Add a member to `images` (name → offset, size) or `labels` (ending → name → class) by its ending; ignore other files."""
    path = PurePosixPath(member.name)
    stem, _, ending = path.name.partition(".")
    if not stem:  # a hidden file, such as macOS's "._a.jpg": no sample, as in the webdataset library
        return
    name, ending = str(path.with_name(stem)), f".{ending.lower()}"
    if (ending in IMAGES and name in images) or name in labels.get(ending, ()):
        raise DataError(f"{shard}: sample {name!r} is there twice ({member.name!r}): mend the shard")
    if ending in IMAGES:
        images[name] = member.offset_data, member.size
    elif ending in labels:
        if member.size > MAX_LABEL_BYTES:
            raise DataError(f"{shard}: {member.name!r} has {member.size:,} bytes, which is no label")
        label = _label((tar.extractfile(member) or io.BytesIO()).read(), ending)
        if label is not None:
            labels[ending][name] = label
        elif ending == ".cls":
            raise DataError(f"{shard}: {member.name!r} is no label: it must hold a whole number from 0 on")


def _label(content: bytes, ending: str) -> int | None:
    """The class number in a .cls file or a .json file (there also under the key label, cls or class); None without one."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if ending == ".json" and isinstance(value, dict):
        value = next((value[key] for key in ("label", "cls", "class") if key in value), None)
    return value if type(value) is int and 0 <= value < 2**31 else None

"""Images that `drivetrain pack` wrote: decoded already, or as JPEGs, in one file that is mapped into memory."""

from __future__ import annotations

import json
import math
import mmap
import os
import warnings
import zlib
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DataError, OperatorGives, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, RunSpec
from drivetrain.core.order import Sampling
from drivetrain.core.source import CropBox, Source
from drivetrain.core.typed import fits
from drivetrain.data.base import Data, Normalize, Splits, Validation
from drivetrain.data.decoding import Decoding, ImageFileSource, crop_and_resize
from drivetrain.data.untrusted import ordinary, read_whole

FORMAT, VERSION = "drivetrain-packed", 3
END, CRC, LABEL = COLUMNS = range(3)  # of a split's table: where a sample ends, its CRC-32, its class
MAX_SIDE = 1 << 16  # pixels
MOST_INDEX = 1 << 26  # bytes of index.json
INDEX: dict[str, Any] = {
    "kind": str, "shape": list[int], "classes": int, "names": list[str] | None, "normalize": dict[str, list[float]] | None,
    "splits": dict[str, dict[str, Any]],
}  # fmt: skip
ENTRY = {"samples": int, "bytes": int, "table": str}
READ_AHEAD_FROM = 1 << 14  # bytes: for larger samples, asking the disk for a whole batch first is faster


class Packed(Data):
    """What `drivetrain pack` wrote: uint8 images of one size, read without decoding, or JPEGs, decoded when read.

    With `verify`, each sample's checksum is checked the first time it is read; a sample that has changed is named.
    """

    machine_local_keys = ("root",)

    def __init__(
        self,
        root: str | None = None,
        size: Count | None = None,
        validation: Validation = "auto",
        verify: bool = True,
        max_pixels: Count = 50_000_000,
        drop_last: bool = True,
        order: Sampling = "shuffled",
    ) -> None:
        self.root = os.path.expanduser(root) if root else None
        self.size, self.validation, self.verify_samples = size, validation, verify
        self.max_pixels, self.drop_last, self.order = max_pixels, drop_last, order

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.root:
            yield OperatorGives("data=packed needs data.root, a folder written by: drivetrain pack SOURCE FOLDER")
            return
        try:
            index = read_index(Path(self.root))
        except UserError as error:
            yield from error.problems
            return
        if self.size is not None and index["kind"] != "jpeg" and self.size != index["shape"][-1]:
            yield (
                f"data.size={self.size}, but the images in {self.root} are decoded already, at {index['shape'][-1]}: "
                f"leave it out, or pack again with --size {self.size} or --jpeg"
            )
        if isinstance(self.validation, str) and self.validation not in ("auto", *index["splits"]):
            yield (
                f"data.validation={self.validation}: {self.root} has only the sets {', '.join(index['splits'])}: "
                "name one of them, or give a share such as 0.1"
            )

    def _index(self) -> dict[str, Any] | None:
        """Return the index; None where there is no valid one, which `validate` reports."""
        try:
            return read_index(Path(self.root)) if self.root else None
        except UserError:
            return None

    def shape(self) -> tuple[int, ...] | None:
        index = self._index()
        return self._read_shape(index) if index else None

    def _read_shape(self, index: dict[str, Any]) -> tuple[int, ...]:
        """Return the shape of an image as it is read, which `size` may make another than the stored one."""
        return tuple(index["shape"]) if self.size is None else (index["shape"][0], self.size, self.size)

    def train_samples(self) -> int | None:
        index = self._index()
        if index is None or (self.share() is not None and self._own(index) is None):  # equal samples stay together
            return None
        return int(index["splits"]["train"]["samples"])

    def _own(self, index: dict[str, Any]) -> str | None:
        """Return the packed set that is the validation set; None where it is a share of the training set, or there is none."""
        own = self.validation if isinstance(self.validation, str) else None
        return own if own != "auto" else "validation" if "validation" in index["splits"] else None

    def decodes_images(self) -> bool:
        return (index := self._index()) is not None and index["kind"] == "jpeg"

    def load(self, device: torch.device) -> Splits:
        root = Path(str(self.root))
        index = read_index(root)
        shape, verify = self._read_shape(index), self.verify_samples
        own = self._own(index)
        names = ["train", "test", *([own] if own else [])]
        sources = [open_split(root, index, name, shape, self.max_pixels, verify) for name in names]
        normalize = Normalize(**index["normalize"]) if index["normalize"] else None
        validation = sources[2] if own else None
        return Splits(sources[0], sources[1], shape, index["classes"], normalize, index["names"], validation=validation)


def read_index(root: Path) -> dict[str, Any]:
    """Read index.json of a packed folder. Raises UserError where it is missing, or not written by `drivetrain pack`."""
    try:
        if not (root / "index.json").exists():
            raise FileNotFoundError
        index = json.loads(read_whole(root / "index.json", MOST_INDEX))
        known = index["format"] == FORMAT
        version = index["version"]
    except FileNotFoundError:
        started = any(root.glob("*.journal"))
        fix = "its packing was not finished: run the same drivetrain pack again" if started else "write one by drivetrain pack"
        raise UserError(f"data.root={root} is no packed folder (no index.json in it): {fix}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        known, version = False, None
    if not known:
        raise UserError(f"{root / 'index.json'} is no index that drivetrain pack wrote: pack again")
    if version != VERSION:
        raise UserError(f"{root} is packed in version {version}, and this drivetrain reads {VERSION}: pack again")
    if wrong := [name for name, kind in INDEX.items() if name not in index or not fits(index[name], kind)] or _senseless(index):
        raise UserError(f"{root / 'index.json'} is no index that drivetrain pack wrote (its {', '.join(wrong)}): pack again")
    return index


def _senseless(index: dict[str, Any]) -> list[str]:
    """Return the names of the entries whose values cannot be."""
    shape, splits = index["shape"], index["splits"]
    good = {
        "shape": len(shape) == 3 and all(0 < side <= MAX_SIDE for side in shape),
        "kind": index["kind"] in ("uint8", "jpeg"),
        "classes": index["classes"] > 0,
        "normalize": index["normalize"] is None or set(index["normalize"]) == {"mean", "std"},
        "splits": {"train", "test"} <= splits.keys() and all(_is_entry(entry) for entry in splits.values()),
    }
    return [name for name, is_good in good.items() if not is_good]


def _is_entry(entry: dict[str, Any]) -> bool:
    """Whether a set's entry says how many samples it has, in how many bytes, and the digest of its table."""
    return all(fits(entry.get(name), kind) for name, kind in ENTRY.items()) and bool(entry["samples"] > 0)


def _check_rows(rows: Any, index: dict[str, Any], size: int, path: Path) -> None:
    """Raise DataError where the table names bytes that the file does not have, or classes that the index does not have."""
    import numpy as np

    ends, labels = rows[:, END], rows[:, LABEL]
    sizes = np.diff(ends, prepend=0)
    stored = sizes == math.prod(index["shape"]) if index["kind"] == "uint8" else sizes > 0
    if not stored.all() or ends[-1] > size or labels.min() < 0 or labels.max() >= index["classes"]:
        raise DataError(f"{path} is no table of these images: pack again")


def open_split(root: Path, index: dict[str, Any], split: str, shape: tuple[int, ...], max_pixels: int, verify: bool) -> RawImages:
    """Open a split as a source. Raises DataError where its files are not what the index describes."""
    import hashlib

    import numpy as np

    entry = index["splits"][split]
    try:
        content = read_whole(root / f"{split}.table", entry["samples"] * len(COLUMNS) * 8)
        size = (root / f"{split}.data").stat().st_size
    except OSError as error:
        raise DataError(f"{root}: {error.filename} cannot be read ({error.strerror}): pack again") from None
    if hashlib.blake2b(content).hexdigest() != entry["table"]:
        raise DataError(f"{root / f'{split}.table'} is not what was packed (its checksum differs): pack again")
    if size != entry["bytes"]:
        raise DataError(f"{root / f'{split}.data'} has {size:,} bytes, not {entry['bytes']:,}: it was cut or copied in part")
    try:
        rows = np.frombuffer(content, "<i8").reshape(entry["samples"], len(COLUMNS))
    except ValueError:
        raise DataError(f"{root / f'{split}.table'} is no table of {entry['samples']:,} samples: pack again") from None
    _check_rows(rows, index, size, root / f"{split}.table")
    table = torch.from_numpy(rows.astype(np.int64))
    if index["kind"] == "jpeg":
        return JpegImages(root / f"{split}.data", table, shape, verify, max_pixels)
    return RawImages(root / f"{split}.data", table, shape, verify)


class RawImages(Source):
    """Decoded images of one size as a source: uint8 (n, c, h, w), stored one after the other in a file, channels last.

    Crops are resized straight from the mapped file.
    """

    crops = True

    def __init__(self, path: Path, table: torch.Tensor, shape: tuple[int, ...], verify: bool) -> None:
        self.path, self.table, self.shape, self.verifies = path, table, shape, verify
        self.begins = torch.cat([torch.zeros_like(table[:1, END]), table[:-1, END]])  # (n,) where each sample begins
        self._expect_all()
        self._open: tuple[mmap.mmap, torch.Tensor] | None = None

    def _expect_all(self) -> None:
        # In memory that worker processes share: each sample is verified once, whichever process reads it.
        self.unverified = torch.ones(len(self.table), dtype=torch.bool).share_memory_() if self.verifies else None

    def __len__(self) -> int:
        return len(self.table)

    def subset(self, indices: torch.Tensor) -> Any:
        """Return a source of some of the samples, in the same file."""
        made = copy(self)
        made.select(indices)
        return made

    def select(self, indices: torch.Tensor) -> None:
        """Keep only these samples (n,), in this order."""
        self.table, self.begins = self.table[indices], self.begins[indices]
        self._expect_all()

    def labels(self) -> torch.Tensor | None:
        """Return the classes (n,)."""
        return self.table[:, LABEL]

    def identities(self) -> list[str]:
        """Return a text for each sample that depends on its content."""
        return [f"{checksum} {label}" for checksum, label in self.table[:, [CRC, LABEL]].tolist()]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}  # each process maps the file itself

    @property
    def mapped(self) -> tuple[mmap.mmap, torch.Tensor]:
        """The file as mapped memory, and as a tensor (bytes,) uint8."""
        if self._open is None:
            # Read-only and shared: the system refuses a private mapping that is larger than the memory.
            with open(self.path, "rb", opener=ordinary) as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                self._open = memory, torch.frombuffer(memory, dtype=torch.uint8)
        return self._open

    def fetch(self, indices: torch.Tensor, boxes: Sequence[CropBox] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        memory, content = self.mapped
        rows = content.view(-1, math.prod(self.shape))
        numbers = self.begins[indices] // rows.shape[1]  # of the samples in the file
        if rows.shape[1] >= READ_AHEAD_FROM:
            _read_ahead(memory, numbers, rows.shape[1])
        channels, height, width = self.shape
        if self.unverified is not None:
            for index in indices[self.unverified[indices]].tolist():
                self.verify(index, self.stored(index))
        if boxes is None:
            x = rows.index_select(0, numbers).view(-1, height, width, channels).permute(0, 3, 1, 2)
        else:
            x = torch.empty(len(indices), *self.shape, dtype=torch.uint8)
            pixels = rows.view(-1, height, width, channels).numpy()
            for target, index, box in zip(x, numbers.tolist(), boxes, strict=True):
                crop = box(width, height)
                target.copy_(crop_and_resize(pixels[index], (width, height), crop, (height, width), box.interpolation))
        return x, self.table[:, LABEL][indices]

    def verify(self, index: int, content: Any) -> None:
        """Raise DataError if a sample's bytes are not those that were packed."""
        if zlib.crc32(content) != self.table[index, CRC]:
            raise DataError(f"{self.path}: sample {index} is not what was packed (its checksum differs): pack again")
        if self.unverified is not None:
            self.unverified[index] = False

    def stored(self, index: int) -> memoryview:
        """Return the bytes of a sample as they are stored."""
        return memoryview(self.mapped[0])[int(self.begins[index]) : int(self.table[index, END])]


class JpegImages(ImageFileSource, RawImages):
    """Images stored as JPEGs and decoded when read: uint8 (n, 3, size, size)."""

    def __init__(self, path: Path, table: torch.Tensor, shape: tuple[int, ...], verify: bool, max_pixels: int) -> None:
        RawImages.__init__(self, path, table, shape, verify)
        ImageFileSource.__init__(self, Decoding(shape[-1], max_pixels), table[:, LABEL])

    def select(self, indices: torch.Tensor) -> None:
        ImageFileSource.select(self, indices)
        RawImages.select(self, indices)

    def content(self, index: int) -> bytes:
        content = bytes(self.stored(index))
        if self.unverified is not None and self.unverified[index]:
            self.verify(index, content)
        return content

    def name(self, index: int) -> str:
        return f"{self.path}: sample {index}"


def _read_ahead(memory: mmap.mmap, indices: torch.Tensor, size: int) -> None:
    """Ask the system to read all samples of a batch from the disk, in the file's order, while the first one is copied."""
    if not hasattr(mmap, "MADV_WILLNEED"):
        return
    for start in (indices.sort().values * size).tolist():
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        memory.madvise(mmap.MADV_WILLNEED, page, start + size - page)

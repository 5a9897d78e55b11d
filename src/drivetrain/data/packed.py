"""Images that `drivetrain pack` has decoded already, mapped into memory."""

from __future__ import annotations

import json
import mmap
import os
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, RunSpec
from drivetrain.data.bad_samples import BadSamplePolicy
from drivetrain.data.base import Data, Normalize, Splits
from drivetrain.data.decoding import Decoding, cut_out

FORMAT, VERSION = "drivetrain-packed", 2
END, CRC, LABEL = range(3)  # the columns of a split's table: where a sample ends, its CRC-32, its class
AHEAD = 1 << 14  # bytes of a sample from which on it pays to ask for it before it is copied


class Packed(Data):
    """What `drivetrain pack` wrote: uint8 images of one size, read without decoding, or JPEGs, decoded when read.

    A sample whose bytes have changed since is found by its checksum and named.
    """

    machine_local_keys = ("root",)

    def __init__(
        self,
        root: str | None = None,
        size: Count | None = None,
        verify: bool = True,
        max_pixels: Count = 100_000_000,
        drop_last: bool = True,
    ) -> None:
        self.root = os.path.expanduser(root) if root else None
        self.size, self.verify_samples, self.max_pixels, self.drop_last = size, verify, max_pixels, drop_last

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.root:
            yield "data=packed needs data.root, a folder written by: drivetrain pack SOURCE FOLDER"
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

    def _index(self) -> dict[str, Any] | None:
        """The index, where there is one to be asked before `check` has spoken."""
        try:
            return read_index(Path(str(self.root)))
        except UserError:
            return None

    def shape(self) -> tuple[int, ...] | None:
        index = self._index()
        return self._out(index) if index else None

    def _out(self, index: dict[str, Any]) -> tuple[int, ...]:
        """The shape of what is read, in place of what is stored."""
        return tuple(index["shape"]) if self.size is None else (index["shape"][0], self.size, self.size)

    def train_samples(self) -> int | None:
        index = self._index()
        return int(index["splits"]["train"]["samples"]) if index else None

    def decodes(self) -> bool:
        return (index := self._index()) is not None and index["kind"] == "jpeg"

    def load(self, device: torch.device) -> Splits:
        root = Path(str(self.root))
        index = read_index(root)
        shape, verify = self._out(index), self.verify_samples
        sources = [open_split(root, index, split, shape, self.max_pixels, verify) for split in ("train", "test")]
        normalize = Normalize(**index["normalize"]) if index["normalize"] else None
        return Splits(sources[0], sources[1], shape, index["classes"], normalize, index["names"])


def read_index(root: Path) -> dict[str, Any]:
    """index.json of a packed folder. Raises UserError where there is none, or none of ours."""
    try:
        index = json.loads((root / "index.json").read_text())
        known = index["format"] == FORMAT
        version = index["version"]
    except FileNotFoundError:
        begun = any(root.glob("*.journal"))
        todo = "its packing was not finished: run the same drivetrain pack again" if begun else "write one by drivetrain pack"
        raise UserError(f"data.root={root} is no packed folder (no index.json in it): {todo}") from None
    except (OSError, ValueError, KeyError, TypeError):
        known, version = False, None
    if not known:
        raise UserError(f"{root / 'index.json'} is no index that drivetrain pack wrote: pack again")
    if version != VERSION:
        raise UserError(f"{root} is packed in version {version}, and this drivetrain reads {VERSION}: pack again")
    return index


def open_split(root: Path, index: dict[str, Any], split: str, shape: tuple[int, ...], max_pixels: int, verify: bool) -> Decoded:
    """A split as a source. Raises DataError where its files are not what the index says."""
    import hashlib
    import io

    import numpy as np

    said = index["splits"][split]
    try:
        content = (root / f"{split}.table").read_bytes()
        size = (root / f"{split}.data").stat().st_size
    except OSError as error:
        raise DataError(f"{root}: {error.filename} cannot be read ({error.strerror}): pack again") from None
    if hashlib.blake2b(content).hexdigest() != said["table"]:
        raise DataError(f"{root / f'{split}.table'} is not what was packed (its checksum differs): pack again")
    if size != said["bytes"]:
        raise DataError(f"{root / f'{split}.data'} has {size:,} bytes, not {said['bytes']:,}: it was cut or copied in part")
    table = torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False))
    if index["kind"] == "jpeg":
        return Jpegs(root / f"{split}.data", table, shape, verify, max_pixels)
    return Decoded(root / f"{split}.data", table, shape, verify)


class Decoded:
    """Samples of one size, one after the other in a file, channels last: uint8 (n, c, h, w), gathered in one go.

    What `boxes` cut out is resized straight from the file's pages.
    """

    crops = True

    def __init__(self, path: Path, table: torch.Tensor, shape: tuple[int, ...], verify: bool) -> None:
        self.path, self.table, self.shape = path, table, shape
        # Marked in memory that worker processes share: each sample is verified once, whoever reads it.
        self.unverified = torch.ones(len(table), dtype=torch.bool).share_memory_() if verify else None
        self._open: tuple[mmap.mmap, torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self.table)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}  # a process maps the file itself

    @property
    def mapped(self) -> tuple[mmap.mmap, torch.Tensor]:
        """The file as mapped memory, and as bytes (n,) in a tensor."""
        if self._open is None:
            # Read-only and shared: a private mapping of a set larger than the memory would be refused as too much.
            with self.path.open("rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                self._open = memory, torch.frombuffer(memory, dtype=torch.uint8)
        return self._open

    def fetch(self, indices: torch.Tensor, boxes: Sequence[Any] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        memory, content = self.mapped
        rows = content.view(len(self.table), -1)
        if rows.shape[1] >= AHEAD:
            _ask_for(memory, indices, rows.shape[1])
        channels, height, width = self.shape
        if self.unverified is not None:
            for index in indices[self.unverified[indices]].tolist():
                self.verify(index, rows[index].numpy())
        if boxes is None:
            x = rows.index_select(0, indices).view(-1, height, width, channels).permute(0, 3, 1, 2)
        else:
            x = torch.empty(len(indices), *self.shape, dtype=torch.uint8)
            pixels = rows.view(-1, height, width, channels).numpy()
            for target, index, box in zip(x, indices.tolist(), boxes, strict=True):
                area = box(width, height)
                target.copy_(cut_out(pixels[index], (width, height), area, (height, width), box.interpolation))
        return x, self.table[:, LABEL][indices]

    def verify(self, index: int, content: Any) -> None:
        """Raise DataError if a sample's bytes are not those that were packed."""
        if zlib.crc32(content) != self.table[index, CRC]:
            raise DataError(f"{self.path}: sample {index} is not what was packed (its checksum differs): pack again")
        if self.unverified is not None:
            self.unverified[index] = False

    def stored(self, index: int) -> memoryview:
        """The bytes of a sample as they lie in the file."""
        start = int(self.table[index - 1, END]) if index else 0
        return memoryview(self.mapped[0])[start : int(self.table[index, END])]


class Jpegs(Decoding, Decoded):
    """Samples kept as JPEG, decoded when read: uint8 (n, 3, size, size)."""

    def __init__(self, path: Path, table: torch.Tensor, shape: tuple[int, ...], verify: bool, max_pixels: int) -> None:
        super().__init__(path, table, shape, verify)
        self.size, self.max_pixels = shape[-1], max_pixels
        self.faults = BadSamplePolicy(self.name)

    def content(self, index: int) -> tuple[bytes, int]:
        content = bytes(self.stored(index))
        if self.unverified is not None and self.unverified[index]:
            self.verify(index, content)
        return content, int(self.table[index, LABEL])

    def name(self, index: int) -> str:
        return f"{self.path}: sample {index}"


def _ask_for(memory: mmap.mmap, indices: torch.Tensor, size: int) -> None:
    """Have the disk read all samples of a batch at once, in the order of the file, while the first is copied."""
    if not hasattr(mmap, "MADV_WILLNEED"):
        return
    for start in (indices.sort().values * size).tolist():
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        memory.madvise(mmap.MADV_WILLNEED, page, start + size - page)

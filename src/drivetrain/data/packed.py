"""Packed images: how `drivetrain pack` stores them, decoded or as JPEGs, in one file that is mapped into memory."""

from __future__ import annotations

import io
import math
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

from drivetrain.core.errors import OperatorGives, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options.option import Count, RunSpec
from drivetrain.core.step.source import CropBox, Source
from drivetrain.data.base import SPLITS, Data, Normalize, Splits, Validation
from drivetrain.data.decoding import (
    Decoding,
    ImageFileSource,
    ImageSize,
    Range,
    crop_and_resize,
    open_image,
    orientation_of,
    pixels_of,
    sides,
    upright,
)
from drivetrain.data.stored import CRC, END, LABEL, Sample, StoredSamples, damaged, read_index, write_index, write_set

READ_AHEAD_FROM = 1 << 14  # bytes: for larger samples, asking the disk for a whole batch first is faster


@dataclass(kw_only=True, eq=False)
class Packed(Data):
    """The files that `drivetrain pack` wrote: uint8 images of one size, read without decoding, or JPEGs, decoded when read.

    With `verify`, each sample's checksum is checked the first time it is read; a sample that has changed is named.
    """

    machine_local_keys = ("root",)

    root: str | None = None
    size: ImageSize | None = None
    validation: Validation = "auto"
    verify: bool = True
    max_pixels: Count = 50_000_000

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.root:
            yield OperatorGives("data=packed needs data.root, a folder written by: drivetrain pack SOURCE FOLDER")
            return
        try:
            index = read_index(Path(self.root))
        except UserError as error:
            yield from error.problems
            return
        if self.size is not None and index["kind"] != "jpeg" and list(sides(self.size)) != index["shape"][1:]:
            stored = "×".join(map(str, index["shape"][1:]))
            yield (
                f"data.size={self.size}, but the images in {self.root} are decoded already, at {stored}: "
                f"leave it out, or pack again with data.size={self.size} or --jpeg"
            )
        for name in self.places("validation").values():
            if name not in index["splits"]:
                yield (
                    f"data.validation={name}: {self.root} has only the sets {', '.join(index['splits'])}: name one of them, or "
                    "give a share such as 0.1"
                )

    def _index(self) -> dict[str, Any] | None:
        """Return the index; None without a valid one, which `validate` reports."""
        try:
            return read_index(Path(self.root)) if self.root else None
        except UserError:
            return None

    def shape(self) -> tuple[int, ...] | None:
        index = self._index()
        return self._read_shape(index) if index else None

    def _read_shape(self, index: dict[str, Any]) -> tuple[int, ...]:
        """Return the shape of an image after reading; `size` may change the stored one."""
        return tuple(index["shape"]) if self.size is None else (index["shape"][0], *sides(self.size))

    def train_samples(self) -> int | None:
        index = self._index()
        if index is None or (self.share() is not None and not self._own(index)):  # equal samples stay together
            return None
        return int(index["splits"]["train"]["samples"])

    def _own(self, index: dict[str, Any]) -> dict[str, str]:
        """Return the packed sets for validation."""
        is_usual = self.validation == "auto" and "validation" in index["splits"]
        return {"": "validation"} if is_usual else self.places("validation")

    def decodes_images(self) -> bool:
        return (index := self._index()) is not None and index["kind"] == "jpeg"

    def load(self, device: torch.device) -> Splits:
        root = Path(str(self.root))
        index = read_index(root)
        shape, verify = self._read_shape(index), self.verify
        own = self._own(index)
        train, test, *others = (
            open_split(root, index, name, shape, self.max_pixels, verify) for name in ("train", "test", *own.values())
        )
        normalize = Normalize(**index["normalize"]) if index["normalize"] else None
        validation = dict(zip(own, others, strict=True))
        return Splits(
            train=train, test=test, shape=shape, classes=index["classes"], normalize=normalize, names=index["names"],
            validation=validation,
        )  # fmt: skip


def open_split(root: Path, index: dict[str, Any], split: str, shape: tuple[int, ...], max_pixels: int, verify: bool) -> RawImages:
    """Open a split as a source. Raises DataError where its files differ from the index."""
    path, table = root / f"{split}.data", StoredSamples.rows(root, index, split)
    labels, sizes = table[:, LABEL], table[:, END].diff(prepend=table.new_zeros(1))
    stored = sizes == math.prod(index["shape"]) if index["kind"] == "uint8" else sizes > 0
    if not stored.all() or labels.min() < 0 or labels.max() >= index["classes"]:
        raise damaged(root / f"{split}.table", "is no table of these images")
    if index["kind"] == "jpeg":
        return JpegImages(path, table, shape, verify, max_pixels)
    return RawImages(path, table, shape, verify)


class RawImages(StoredSamples, Source):
    """Decoded images of one size as a source: uint8 (n, c, h, w), stored one after the other in a file, channels last.

    Crops are resized straight from the mapped file.
    """

    crops = True

    def __init__(self, path: Path, table: torch.Tensor, shape: tuple[int, ...], verify: bool) -> None:
        super().__init__(path, table, verify)
        self.shape = shape

    def __len__(self) -> int:
        return len(self.table)

    def subset(self, indices: torch.Tensor) -> Self:
        """Return a source of some of the samples, in the same file."""
        made = copy(self)
        made.select(indices)
        return made

    def select(self, indices: torch.Tensor) -> None:
        """Keep only these samples (n,), in this order."""
        self.table, self.begins = self.table[indices], self.begins[indices]
        self.expect_all()

    def labels(self) -> torch.Tensor | None:
        """Return the classes (n,)."""
        return self.table[:, LABEL]

    def identities(self) -> list[str]:
        """Return a text for each sample that depends on its content."""
        return [f"{checksum} {label}" for checksum, label in self.table[:, [CRC, LABEL]].tolist()]

    def fetch(self, indices: torch.Tensor, boxes: Sequence[CropBox] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        memory, content = self.mapped
        rows = content.view(-1, math.prod(self.shape))
        numbers = self.begins[indices] // rows.shape[1]  # of the samples in the file
        if rows.shape[1] >= READ_AHEAD_FROM:
            _read_ahead(memory, numbers, rows.shape[1])
        channels, height, width = self.shape
        self.check(indices)
        if boxes is None:
            x = rows.index_select(0, numbers).view(-1, height, width, channels).permute(0, 3, 1, 2)
        else:
            x = torch.empty(len(indices), *self.shape, dtype=torch.uint8)
            pixels = rows.view(-1, height, width, channels).numpy()
            for target, index, box in zip(x, numbers.tolist(), boxes, strict=True):
                crop = box(width, height)
                target.copy_(crop_and_resize(pixels[index], (width, height), crop, (height, width), box.interpolation))
        return x, self.table[:, LABEL][indices]


class JpegImages(ImageFileSource, RawImages):
    """Images stored as JPEGs and decoded when read: uint8 (n, 3, size, size)."""

    def __init__(self, path: Path, table: torch.Tensor, shape: tuple[int, ...], verify: bool, max_pixels: int) -> None:
        RawImages.__init__(self, path, table, shape, verify)
        ImageFileSource.__init__(self, Decoding(shape[1:], max_pixels), table[:, LABEL])

    def select(self, indices: torch.Tensor) -> None:
        ImageFileSource.select(self, indices)
        RawImages.select(self, indices)

    def content(self, index: int) -> bytes:
        self.check(torch.tensor([index]))
        return bytes(self.stored(index))

    def name(self, index: int) -> str:
        return f"{self.path}: sample {index}"


def _read_ahead(memory: mmap.mmap, indices: torch.Tensor, size: int) -> None:
    """Ask the system to read all samples of a batch from the disk, in the file's order, while the first one is copied."""
    if not hasattr(mmap, "MADV_WILLNEED"):
        return
    for start in (indices.sort().values * size).tolist():
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        memory.madvise(mmap.MADV_WILLNEED, page, start + size - page)


TASK = 16  # samples that a thread decodes at a time

OnProgress = Callable[[str, int, int], None]  # called with a split's name, the samples in all, and the samples done


class Raw:
    """Stores decoded images: uint8, all of one shape, channels last."""

    kind = "uint8"

    def __call__(self, source: Source, indices: list[int]) -> list[Sample]:
        x, y = source.fetch(torch.tensor(indices))
        if not isinstance(x, torch.Tensor):
            raise UserError("drivetrain pack stores images, and the inputs of this data's samples are several")
        if x.dtype != torch.uint8:
            raise UserError(f"drivetrain pack stores images of whole numbers from 0 to 255, and this data gives {x.dtype}")
        channels_last = x.permute(0, 2, 3, 1).contiguous()
        return [(row.tobytes(), label) for row, label in zip(channels_last.numpy(), y.tolist(), strict=True)]


class Jpeg:
    """Stores JPEGs: a JPEG file itself where its shorter side is at most `size`, else the image shrunk to that size."""

    kind = "jpeg"

    def __init__(self, size: int, quality: int) -> None:
        self.size, self.quality = size, quality

    def __call__(self, source: Source, indices: list[int]) -> list[Sample]:
        if not isinstance(source, ImageFileSource):
            raise UserError("drivetrain pack --jpeg keeps image files, and this data has none: leave --jpeg out")
        read = map(source.image_file, indices)
        return [(self.encode(content, source.name(found), source.range), int(source.targets[found])) for content, found in read]

    def encode(self, content: bytes, name: str, scale: Range | None) -> bytes:
        """Return an image file as a JPEG whose shorter side is at most `size`."""
        import numpy as np
        from PIL import Image

        with open_image(content, name) as image:
            if min(image.size) <= self.size and image.format == "JPEG" and not (scale and scale.said):
                return content
            orientation = orientation_of(image, name, image.width * image.height)
            image.draft("RGB", (self.size, self.size))
            whole = Image.fromarray(np.ascontiguousarray(upright(pixels_of(image, name, scale), orientation)))
        factor = min(1.0, self.size / min(whole.size))
        small = whole.resize([max(1, round(side * factor)) for side in whole.size], Image.Resampling.BILINEAR)
        out = io.BytesIO()
        small.save(out, "JPEG", quality=self.quality)
        return out.getvalue()


def pack(
    splits: Splits, out: Path, encode: Raw | Jpeg, shape: tuple[int, ...], about: str, threads: int, on_progress: OnProgress
) -> None:
    """Write all sets, then index.json, which marks the folder as complete. A continued packing writes the same bytes.

    `about` describes the content and the format. A folder begun with another `about` is refused (UserError).
    """
    sets = {"train": splits.train, **{split: each for split in SPLITS for each in splits.sets(split).values()}}
    entries = {
        name: write_set(out, name, about, partial(_encoded, source, encode, threads), partial(on_progress, name, len(source)))
        for name, source in sets.items()
    }
    normalize = splits.normalize
    write_index(out, {
        "kind": encode.kind, "shape": list(shape), "classes": splits.classes,
        "names": None if splits.names is None else list(splits.names), "about": about, "splits": entries,
        "normalize": normalize and {"mean": normalize.mean.flatten().tolist(), "std": normalize.std.flatten().tolist()},
    })  # fmt: skip


def _encoded(source: Source, encode: Raw | Jpeg, threads: int, start: int) -> Iterator[Sample]:
    """Yield the samples from `start` on, in order. Threads encode them."""
    tasks = (list(range(i, min(i + TASK, len(source)))) for i in range(start, len(source), TASK))
    with ThreadPoolExecutor(threads) as pool:
        running = deque(pool.submit(encode, source, task) for task in islice(tasks, 2 * threads))
        while running:
            yield from running.popleft().result()
            running.extend(pool.submit(encode, source, task) for task in islice(tasks, 1))

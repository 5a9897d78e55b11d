"""Writes what data=packed reads: samples one after the other. A packing that was killed can be continued."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.files import write_json
from drivetrain.core.lazy import torch
from drivetrain.data.base import SPLITS, Source, Splits
from drivetrain.data.decoding import ImageFileSource, Range, open_image, orientation_of, pixels_of, upright
from drivetrain.data.packed import CRC, END, FORMAT, LABEL, VERSION, open_split, read_index

CHUNK = 32 << 20  # bytes written between two entries of the journal, about
TASK = 16  # samples that a thread decodes at a time

Sample = tuple[bytes, int]  # its stored bytes and its class
OnProgress = Callable[[str, int, int], None]  # called with a split's name, the samples done, and the samples in all


class Encoder(Protocol):
    """How samples are stored."""

    kind: str  # in index.json

    def __call__(self, source: Source, indices: list[int]) -> list[Sample]:
        """Return the stored form of some of a source's samples."""
        ...


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
    splits: Splits, out: Path, encode: Encoder, shape: tuple[int, ...], about: str, threads: int, on_progress: OnProgress
) -> None:
    """Write all sets, then index.json, which marks the folder as complete. A continued packing writes the same bytes.

    `about` describes what is packed and how. A folder that was begun with another `about` is refused (UserError).
    """
    entries = {}
    for name, source in {
        "train": splits.train,
        **{split: each for split in SPLITS for each in splits.sets(split).values()},
    }.items():
        entries[name] = _pack_split(name, source, out, encode, about, threads, on_progress)
    normalize = splits.normalize
    write_json(out / "index.json", {
        "format": FORMAT, "version": VERSION, "kind": encode.kind, "shape": list(shape), "classes": splits.classes,
        "names": None if splits.names is None else list(splits.names), "about": about, "splits": entries,
        "normalize": normalize and {"mean": normalize.mean.flatten().tolist(), "std": normalize.std.flatten().tolist()},
    })  # fmt: skip
    for name in entries:
        (out / f"{name}.journal").unlink()


def _pack_split(
    name: str, source: Source, out: Path, encode: Encoder, about: str, threads: int, on_progress: OnProgress
) -> dict[str, Any]:
    """Write a split's data and table; return its entry in the index."""
    import numpy as np

    journal = out / f"{name}.journal"
    rows = _read_journal(journal, about)
    with (out / f"{name}.data").open("r+b" if rows else "wb") as data, journal.open("a" if rows else "w") as log:
        if not rows:
            _write(log, json.dumps(about))
        end = rows[-1][END] if rows else 0
        data.truncate(end)  # what was written after the journal's last entry
        data.seek(end)
        on_progress(name, len(rows), len(source))
        for chunk in _chunks(source, encode, len(rows), threads):
            more = []
            for content, label in chunk:
                end += len(content)
                data.write(content)
                more.append([end, zlib.crc32(content), label])
            _sync(data)  # before the journal: the samples it lists are on the disk
            _write(log, json.dumps(more))
            rows += more
            on_progress(name, len(rows), len(source))
    table = np.array(rows, "<i8").tobytes()  # no header to parse: numpy parses those of .npy files as Python, unsafe in threads
    with (out / f"{name}.table").open("wb") as file:
        file.write(table)
        _sync(file)
    return {"samples": len(rows), "bytes": end, "table": hashlib.blake2b(table).hexdigest()}


def _chunks(source: Source, encode: Encoder, start: int, threads: int) -> Iterator[list[Sample]]:
    """Yield the samples from `start` on, in order, in lists of about CHUNK bytes. Threads encode them."""
    tasks = (list(range(i, min(i + TASK, len(source)))) for i in range(start, len(source), TASK))
    chunk: list[Sample] = []
    with ThreadPoolExecutor(threads) as pool:
        running: deque[Any] = deque()
        more = True
        while more or running:
            while len(running) < 2 * threads and (more := (task := next(tasks, None)) is not None):
                running.append(pool.submit(encode, source, task))
            if running:
                chunk += running.popleft().result()
            if sum(len(content) for content, _ in chunk) >= CHUNK:
                yield chunk
                chunk = []
    if chunk:
        yield chunk


def _read_journal(journal: Path, about: str) -> list[list[int]]:
    """Return the table's rows that an earlier packing wrote. Raises UserError where it packed something else."""
    try:
        whole = journal.read_text(encoding="utf-8").rpartition("\n")[0]
    except FileNotFoundError:
        return []
    lines = whole.splitlines()
    try:
        begun = json.loads(lines[0]) if lines else about
        rows = [row for line in lines[1:] for row in json.loads(line)]
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"{journal} is damaged: give another folder, or remove {journal.parent}") from None
    if begun != about:
        raise UserError(f"{journal.parent} was begun with something else ({lines[0][:300]}): give another folder or remove it")
    os.truncate(journal, len(whole) + bool(whole))  # drop a last line that was not written to its end
    return rows


def _write(file: Any, line: str) -> None:
    file.write(line + "\n")
    _sync(file)


def _sync(file: BinaryIO | Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def verify(out: Path, on_progress: OnProgress) -> int:
    """Check every sample's checksum; return the number of samples. Raises DataError naming all that differ."""
    index = read_index(out)
    broken, count = [], 0
    for name in index["splits"]:
        split = open_split(out, index, name, tuple(index["shape"]), 1, verify=True)
        for i in range(len(split)):
            if zlib.crc32(split.stored(i)) != split.table[i, CRC]:
                broken.append(f"{split.path}: sample {i} (class {int(split.table[i, LABEL])}) is not what was packed: pack again")
            if i % 1000 == 999 or i + 1 == len(split):
                on_progress(name, i + 1, len(split))
        count += len(split)
    if broken:
        raise DataError(broken)
    return count

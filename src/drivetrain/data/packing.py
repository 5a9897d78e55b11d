"""Writing what data=packed reads: samples one after the other, going on where a killed packing was."""

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
from typing import Any, BinaryIO

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.files import write_json
from drivetrain.core.lazy import torch
from drivetrain.data.base import Source, Splits
from drivetrain.data.decoding import in_rgb
from drivetrain.data.packed import CRC, END, FORMAT, LABEL, VERSION, open_split, read_index

CHUNK = 32 << 20  # bytes decoded between two entries of the journal, about
PORTION = 16  # samples that a thread decodes at once

Sample = tuple[bytes, int]  # as it is stored, and its class
Step = Callable[[str, int, int], None]  # split, samples done, samples in all


class Raw:
    """Samples stored as decoded: uint8, all of one shape, channels last."""

    kind = "uint8"

    def __call__(self, source: Any, indices: list[int]) -> list[Sample]:
        x, y = source.fetch(torch.tensor(indices))
        if x.dtype != torch.uint8:
            raise UserError(f"drivetrain pack stores images of whole numbers from 0 to 255, and this data gives {x.dtype}")
        channels_last = x.permute(0, 2, 3, 1).contiguous()
        return [(row.tobytes(), label) for row, label in zip(channels_last.numpy(), y.tolist(), strict=True)]


class Jpeg:
    """Samples stored as JPEG: the file itself where its shorter side is at most `size`, else shrunk to that."""

    kind = "jpeg"

    def __init__(self, size: int, quality: int) -> None:
        self.size, self.quality = size, quality

    def __call__(self, source: Any, indices: list[int]) -> list[Sample]:
        if not hasattr(source, "encoded"):
            raise UserError("drivetrain pack --jpeg keeps image files, and this data has none: leave --jpeg out")
        return [(self.shrunk(content), label) for content, label in map(source.encoded, indices)]

    def shrunk(self, content: bytes) -> bytes:
        """An image file as a JPEG whose shorter side is at most `size`."""
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(content)) as image:
            if min(image.size) <= self.size and image.format == "JPEG":
                return content
            image.draft("RGB", (self.size, self.size))
            upright = in_rgb(ImageOps.exif_transpose(image))
        factor = min(1.0, self.size / min(upright.size))
        small = upright.resize([max(1, round(side * factor)) for side in upright.size], Image.Resampling.BILINEAR)
        out = io.BytesIO()
        small.save(out, "JPEG", quality=self.quality)
        return out.getvalue()


def pack(splits: Splits, out: Path, store: Any, shape: tuple[int, ...], about: str, threads: int, step: Step) -> None:
    """Write both splits and then index.json, without which a folder is not packed. The bytes are the same, killed or not.

    `about` says what is packed and how: a folder begun with another one is refused (UserError).
    """
    said = {}
    for name, source in (("train", splits.train), ("test", splits.test)):
        said[name] = _split(name, source, out, store, about, threads, step)
    normalize = splits.normalize
    write_json(out / "index.json", {
        "format": FORMAT, "version": VERSION, "kind": store.kind, "shape": list(shape), "classes": splits.classes,
        "names": None if splits.names is None else list(splits.names), "about": about, "splits": said,
        "normalize": normalize and {"mean": normalize.mean.flatten().tolist(), "std": normalize.std.flatten().tolist()},
    })  # fmt: skip
    for name in said:
        (out / f"{name}.journal").unlink()


def _split(name: str, source: Source, out: Path, store: Any, about: str, threads: int, step: Step) -> dict[str, Any]:
    """One split's data and table; what the index says of it."""
    import numpy as np

    journal = out / f"{name}.journal"
    rows = _begun(journal, about)
    with (out / f"{name}.data").open("r+b" if rows else "wb") as data, journal.open("a" if rows else "w") as log:
        if not rows:
            _write(log, json.dumps(about))
        end = rows[-1][END] if rows else 0
        data.truncate(end)  # what was written after the journal's last entry
        data.seek(end)
        step(name, len(rows), len(source))
        for chunk in _chunks(source, store, len(rows), threads):
            more = []
            for content, label in chunk:
                end += len(content)
                data.write(content)
                more.append([end, zlib.crc32(content), label])
            _sync(data)  # the bytes first: what the journal names is there
            _write(log, json.dumps(more))
            rows += more
            step(name, len(rows), len(source))
    table = io.BytesIO()
    np.save(table, np.array(rows, np.int64))
    with (out / f"{name}.table").open("wb") as file:
        file.write(table.getvalue())
        _sync(file)
    return {"samples": len(rows), "bytes": end, "table": hashlib.blake2b(table.getvalue()).hexdigest()}


def _chunks(source: Source, store: Any, start: int, threads: int) -> Iterator[list[Sample]]:
    """The samples from `start` on, stored, in pieces of about CHUNK bytes; decoded by threads, in order."""
    portions = (list(range(i, min(i + PORTION, len(source)))) for i in range(start, len(source), PORTION))
    chunk: list[Sample] = []
    with ThreadPoolExecutor(threads) as pool:
        running: deque[Any] = deque()
        more = True
        while more or running:
            while len(running) < 2 * threads and (more := (portion := next(portions, None)) is not None):
                running.append(pool.submit(store, source, portion))
            if running:
                chunk += running.popleft().result()
            if sum(len(content) for content, _ in chunk) >= CHUNK:
                yield chunk
                chunk = []
    if chunk:
        yield chunk


def _begun(journal: Path, about: str) -> list[list[int]]:
    """The table's rows that a packing before this one has written. Raises UserError where it packed something else."""
    try:
        whole = journal.read_text().rpartition("\n")[0]
    except FileNotFoundError:
        return []
    lines = whole.splitlines()
    if lines and json.loads(lines[0]) != about:
        raise UserError(f"{journal.parent} was begun with something else ({lines[0][:300]}): give another folder or remove it")
    os.truncate(journal, len(whole) + bool(whole))  # a last line without its end was cut
    return [row for line in lines[1:] for row in json.loads(line)]


def _write(file: Any, line: str) -> None:
    file.write(line + "\n")
    _sync(file)


def _sync(file: BinaryIO | Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def verify(out: Path, step: Step) -> int:
    """Check every sample's checksum; how many there are. Raises DataError naming all that differ."""
    index = read_index(out)
    broken, count = [], 0
    for name in index["splits"]:
        split = open_split(out, index, name, tuple(index["shape"]), 1, verify=True)
        for i in range(len(split)):
            if zlib.crc32(split.stored(i)) != split.table[i, CRC]:
                broken.append(f"{split.path}: sample {i} (class {int(split.table[i, LABEL])}) is not what was packed: pack again")
            if i % 1000 == 999 or i + 1 == len(split):
                step(name, i + 1, len(split))
        count += len(split)
    if broken:
        raise DataError(broken)
    return count

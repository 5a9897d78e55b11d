"""Packs images: how samples are stored for data=packed."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.data.base import SPLITS, Source, Splits
from drivetrain.data.decoding import ImageFileSource, Range, open_image, orientation_of, pixels_of, upright
from drivetrain.data.stored import Sample, write_index, write_set

TASK = 16  # samples that a thread decodes at a time

OnProgress = Callable[[str, int, int], None]  # called with a split's name, the samples in all, and the samples done


class Encoder(Protocol):
    """The form in which samples are stored."""

    kind: str  # in index.json

    def __call__(self, source: Source, indices: list[int]) -> list[Sample]:
        """Return the stored form and the class of some of a source's samples."""
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


def _encoded(source: Source, encode: Encoder, threads: int, start: int) -> Iterator[Sample]:
    """Yield the samples from `start` on, in order. Threads encode them."""
    tasks = (list(range(i, min(i + TASK, len(source)))) for i in range(start, len(source), TASK))
    with ThreadPoolExecutor(threads) as pool:
        running = deque(pool.submit(encode, source, task) for task in islice(tasks, 2 * threads))
        while running:
            yield from running.popleft().result()
            running.extend(pool.submit(encode, source, task) for task in islice(tasks, 1))

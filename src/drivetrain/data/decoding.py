"""Image files to pixels: JPEGs by libjpeg-turbo, everything else by Pillow."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from drivetrain.core.errors import DataError
from drivetrain.core.lazy import torch
from drivetrain.data.bad_samples import BadSamplePolicy

ORIENTATION = 0x0112  # the EXIF tag
EXIF_WITHIN = 2**16  # bytes: a JPEG's EXIF stands before its pixels
DAMAGED = "cannot be read as an image ({}): mend or remove it"


class Decoding:
    """A source that decodes an image file for each sample: uint8 (n, 3, size, size). What is its own is where files lie."""

    parallel_read = True  # decoding is work
    crops = True  # it takes boxes: crops at decoding
    faults: BadSamplePolicy
    size: int
    max_pixels: int

    def content(self, index: int) -> tuple[bytes, int]:
        """Sample `index`'s image file and its label. Raises DataError naming it."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """What messages call a sample."""
        raise NotImplementedError

    def decoded(self, index: int, box: Any = None) -> tuple[torch.Tensor, int]:
        """Sample `index`, uint8 (3, size, size), and its label. Raises DataError naming it."""
        content, label = self.content(index)
        return decode(content, self.name(index), self.size, self.max_pixels, box), label

    def fetch(self, indices: torch.Tensor, boxes: Sequence[Any] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The images, or what `boxes` cuts out of each, and their labels."""
        cut = [None] * len(indices) if boxes is None else boxes
        x = torch.empty(len(indices), 3, self.size, self.size, dtype=torch.uint8)
        y = torch.empty(len(indices), dtype=torch.int64)
        for place, (image, label) in enumerate(self.samples(indices.tolist(), cut)):
            x[place], y[place] = image, label
        return x, y

    def samples(self, indices: list[int], boxes: Sequence[Any]) -> Iterable[tuple[torch.Tensor, int]]:
        """Each sample, in order."""
        return map(self.sample, indices, boxes)

    def sample(self, index: int, box: Any = None) -> tuple[torch.Tensor, int]:
        """One sample, or what stands for it: uint8 (3, size, size) and its label."""
        return self.faults.read(index, lambda found: self.decoded(found, box))

    def encoded(self, index: int) -> tuple[bytes, int]:
        """The file as it is, of the sample or, where that cannot be decoded, of what stands for it; and its label."""
        return self.content(self.faults.read(index, lambda found: (self.decoded(found), found)[1]))

    def undecoded(self, index: int, box: Any = None) -> tuple[bytes, int, Layout, int]:
        """For whoever decodes elsewhere: the file, the label, what is wanted of it, and which sample it is, whose head reads."""

        def head(found: int) -> tuple[bytes, int, Layout, int]:
            content, label = self.content(found)
            return content, label, seen(content, self.name(found), self.max_pixels, box), found

        return self.faults.read(index, head)

    def skipped(self) -> list[str]:
        """The names of the samples that others stood for."""
        return self.faults.skipped()


class Layout(NamedTuple):
    """What an image file's head says, and what is to be made of it."""

    full: tuple[int, int]  # width and height of the upright image
    area: tuple[int, int, int, int]  # left, top, width and height in it that are wanted
    orientation: int  # EXIF's: 1 lies as it is meant, from 5 on it is on its side
    plain: bool  # a JPEG in RGB or grey that lies as it is meant


def seen(content: bytes, name: str, max_pixels: int, box: Any = None) -> Layout:
    """The layout of an image file: the largest square at its centre, or what `box` cuts out. DataError if it is too large."""
    if (size := _plain_size(content)) is not None:
        orientation, plain = 1, True
    else:
        with opened(content, name) as image:
            size = image.size
            orientation = 1 if image.width * image.height > max_pixels else image.getexif().get(ORIENTATION, 1)
            plain = image.format == "JPEG" and image.mode in ("RGB", "L") and orientation == 1
    if size[0] * size[1] > max_pixels:
        raise DataError(f"{name} has {size[0]}×{size[1]} pixels, over data.max_pixels={max_pixels}")
    full = size[::-1] if orientation >= 5 else size
    return Layout(full, centre(*full) if box is None else box(*full), orientation, plain)


def _plain_size(content: bytes) -> tuple[int, int] | None:
    """Width and height of a JPEG in colour or grey without EXIF; None: not one, or Pillow is to judge it (ten times as slow)."""
    import simplejpeg

    if content[:2] != b"\xff\xd8" or b"Exif" in content[:EXIF_WITHIN]:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        return None
    return (width, height) if colours in ("YCbCr", "RGB", "Gray", "GRAY") else None


@contextmanager
def opened(content: bytes, name: str) -> Iterator[Any]:
    """An image file by Pillow; whatever fails with it becomes a DataError with its name."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            yield image
    except DataError:
        raise
    except Exception as error:  # a damaged file can make an image library fail in any way
        raise DataError(f"{name} {DAMAGED.format(error)}") from None


def decode(content: bytes, name: str, size: int, max_pixels: int, box: Any = None) -> torch.Tensor:
    """An image file as uint8 (3, size, size): the largest square at its centre, or what `box` (augment.Box) cuts out, resized.

    Memory is channels last. Raises DataError with the file's name.
    """
    full, area, orientation, plain = seen(content, name, max_pixels, box)
    enough = [math.ceil(size * f / c) for f, c in zip(full, area[2:], strict=True)]
    pixels = _turbo(content, enough) if plain else None
    if pixels is None:
        with opened(content, name) as image:
            pixels = _pillow(image, enough[::-1] if orientation >= 5 else enough)
    return cut_out(pixels, full, area, (size, size), "bilinear" if box is None else box.interpolation)


def centre(width: int, height: int) -> tuple[int, int, int, int]:
    """Left, top, width and height of the largest square in the middle."""
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def _turbo(content: bytes, enough: Sequence[int]) -> Any:
    """A JPEG (h, w, 3), of half the size, a quarter or an eighth where that is `enough`. None: Pillow is to judge it.

    Measured against Pillow on photographs of 500×400: 1.0 ms for 1.4 ms.
    """
    import simplejpeg

    try:
        width, height = enough
        return simplejpeg.decode_jpeg(content, "RGB", min_height=height, min_width=width, min_factor=2)
    except ValueError:
        return None


def _pillow(image: Any, enough: Sequence[int]) -> Any:
    """An opened image (h, w, 3), upright; `enough` is the width and height that will do, as it lies."""
    import numpy as np
    from PIL import ImageOps

    image.draft("RGB", tuple(enough))  # JPEG: half, a quarter or an eighth of the size
    return np.asarray(in_rgb(ImageOps.exif_transpose(image)))


def cut_out(pixels: Any, full: tuple[int, int], area: Sequence[int], size: tuple[int, int], interpolation: str) -> torch.Tensor:
    """`area` (left, top, width, height in an image of `full` size) of pixels (h, w, c), stretched to uint8 (c, *size).

    Memory is channels last: torch's kernel for bytes takes half the time of Pillow's on it, and double the time on planes.
    """
    import numpy as np

    height, width = pixels.shape[:2]
    left, right = (round(x * width / full[0]) for x in (area[0], area[0] + area[2]))
    top, bottom = (round(y * height / full[1]) for y in (area[1], area[1] + area[3]))
    part = torch.from_numpy(np.array(pixels[top : max(bottom, top + 1), left : max(right, left + 1)])).permute(2, 0, 1)
    resize = torch.nn.functional.interpolate
    return resize(part.unsqueeze(0), size, mode=interpolation, antialias=True).squeeze(0)


def in_rgb(image: Any) -> Any:
    """Any kind of image in RGB. Sixteen bits are scaled to eight: PIL's conversion would cut them off at 255."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    return image.convert("RGB")

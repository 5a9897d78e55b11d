"""Image files to pixels: JPEGs by libjpeg-turbo, everything else by Pillow."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Annotated, Any, NamedTuple

from annotated_types import Gt, Le

from drivetrain.core.errors import DataError
from drivetrain.core.lazy import torch
from drivetrain.core.source import CropBox, Source
from drivetrain.data.bad_samples import BadSamplePolicy

CropShare = Annotated[float, Gt(0), Le(1)]
ORIENTATION = 0x0112  # the EXIF tag
EXIF_WITHIN = 2**16  # bytes: a JPEG's EXIF stands before its pixels
DAMAGED = "cannot be read as an image ({}): mend or remove it"


class ImageFileSource(Source):
    """A source that decodes an image file for each sample: uint8 (n, 3, size, size). Subclasses say where the files are."""

    parallel_read = True  # decoding is work that threads share
    crops = True  # fetch takes crop boxes
    decodes_files = True  # a loader may decode the files itself (image_file_and_layout)
    policy: BadSamplePolicy
    size: int
    max_pixels: int
    crop_pct: float = 1.0  # share of the side of the middle square, where a sample has no crop box

    def content(self, index: int) -> tuple[bytes, int]:
        """Return a sample's image file and its label. Raises DataError naming the sample."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return what messages call a sample."""
        raise NotImplementedError

    def fetch(self, indices: torch.Tensor, boxes: Sequence[CropBox] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images, cropped to `boxes` where they are given, and their labels."""
        crops = [None] * len(indices) if boxes is None else boxes
        x = torch.empty(len(indices), 3, self.size, self.size, dtype=torch.uint8)
        y = torch.empty(len(indices), dtype=torch.int64)
        for row, (image, label) in enumerate(self.samples(indices.tolist(), crops)):
            x[row], y[row] = image, label
        return x, y

    def samples(self, indices: list[int], boxes: Sequence[CropBox | None]) -> Iterable[tuple[torch.Tensor, int]]:
        """Return the samples in the order of `indices`."""
        return map(self.sample, indices, boxes)

    def sample(self, index: int, box: CropBox | None = None) -> tuple[torch.Tensor, int]:
        """Return one sample, or the one that replaces it: uint8 (3, size, size) and its label."""
        return self.policy.read(index, lambda candidate: self.decoded(candidate, box))

    def decoded(self, index: int, box: CropBox | None = None) -> tuple[torch.Tensor, int]:
        """Return one sample itself: uint8 (3, size, size) and its label. Raises DataError naming it."""
        content, label = self.content(index)
        return decode(content, self.name(index), self.size, self.max_pixels, box, self.crop_pct), label

    def image_file(self, index: int) -> tuple[bytes, int]:
        """Return a sample's file, unchanged, and its label; those of its replacement if the file cannot be decoded."""

        def decodable(candidate: int) -> int:
            self.decoded(candidate)
            return candidate

        return self.content(self.policy.read(index, decodable))

    def image_file_and_layout(self, index: int, box: CropBox | None = None) -> tuple[bytes, int, Layout, int]:
        """Return a sample's file, label, layout and index for a loader that decodes files itself.

        A file whose header cannot be read is replaced; the index is then the replacement's.
        """

        def read(candidate: int) -> tuple[bytes, int, Layout, int]:
            content, label = self.content(candidate)
            return content, label, read_layout(content, self.name(candidate), self.max_pixels, box, self.crop_pct), candidate

        return self.policy.read(index, read)

    def subset(self, indices: torch.Tensor) -> ImageFileSource:
        """Return a source of some of the samples. One that cannot be read is replaced by another one of them."""
        made = copy(self)
        made.select(indices)
        made.policy = self.policy.renewed(len(indices), made.name)
        return made

    def select(self, indices: torch.Tensor) -> None:
        """Keep only these samples (n,), in this order."""
        raise NotImplementedError

    def skipped(self) -> list[str]:
        """Return the names of the samples that were replaced."""
        return self.policy.skipped()


class Layout(NamedTuple):
    """What an image file's header says, and which part of the image is wanted."""

    size: tuple[int, int]  # width and height of the upright image
    crop: tuple[int, int, int, int]  # left, top, width and height of the wanted part, in the upright image
    orientation: int  # EXIF's: 1 is upright, from 5 on width and height are swapped
    plain_jpeg: bool  # an upright JPEG in RGB or grey


def read_layout(content: bytes, name: str, max_pixels: int, box: CropBox | None = None, crop_pct: float = 1.0) -> Layout:
    """Read an image file's layout; without `box` the crop is a square in the middle. DataError if the image is too large."""
    if (size := _plain_jpeg_size(content)) is not None:
        orientation, plain = 1, True
    else:
        with open_image(content, name) as image:
            size = image.size
            orientation = 1 if image.width * image.height > max_pixels else image.getexif().get(ORIENTATION, 1)
            plain = image.format == "JPEG" and image.mode in ("RGB", "L") and orientation == 1
    if size[0] * size[1] > max_pixels:
        raise DataError(f"{name} has {size[0]}×{size[1]} pixels, over data.max_pixels={max_pixels}")
    upright = size[::-1] if orientation >= 5 else size
    return Layout(upright, center_square(upright[0], upright[1], crop_pct) if box is None else box(*upright), orientation, plain)


def _plain_jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Return width and height of a JPEG in colour or grey without EXIF; None for other files, which Pillow reads (10× slower)."""
    import simplejpeg

    if content[:2] != b"\xff\xd8" or b"Exif" in content[:EXIF_WITHIN]:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        return None
    return (width, height) if colours in ("YCbCr", "RGB", "Gray", "GRAY") else None


@contextmanager
def open_image(content: bytes, name: str) -> Iterator[Any]:
    """Open an image file with Pillow. Whatever fails while it is open becomes a DataError with the file's name."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as image:
            yield image
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{name} {DAMAGED.format('it has no format that Pillow knows')}") from None
    except Exception as error:  # a damaged file can make an image library fail in any way
        raise DataError(f"{name} {DAMAGED.format(error)}") from None


def decode(
    content: bytes, name: str, size: int, max_pixels: int, box: CropBox | None = None, crop_pct: float = 1.0
) -> torch.Tensor:
    """Decode an image file, crop it to `box` or to a square in its middle, and resize it: uint8 (3, size, size).

    Memory is channels last. Raises DataError with the file's name.
    """
    upright, crop, orientation, plain = read_layout(content, name, max_pixels, box, crop_pct)
    # The smallest width and height to decode at that still gives the crop `size` pixels a side.
    needed = [math.ceil(size * whole / part) for whole, part in zip(upright, crop[2:], strict=True)]
    pixels = _decode_jpeg(content, needed) if plain else None
    if pixels is None:
        with open_image(content, name) as image:
            pixels = _decode_with_pillow(image, needed[::-1] if orientation >= 5 else needed)
    return crop_and_resize(pixels, upright, crop, (size, size), "bilinear" if box is None else box.interpolation)


def center_square(width: int, height: int, share: float = 1.0) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a square in the middle, whose side is this share of the shorter one's."""
    side = max(1, round(min(width, height) * share))
    return (width - side) // 2, (height - side) // 2, side, side


def _decode_jpeg(content: bytes, needed: Sequence[int]) -> Any:
    """Decode a JPEG (h, w, 3) at half, a quarter or an eighth of its size where that is at least `needed` (width, height).

    Returns None for a file that libjpeg-turbo refuses; Pillow decides about it. Measured on photographs of 500×400 pixels:
    1.0 ms, where Pillow takes 1.4 ms.
    """
    import simplejpeg

    try:
        width, height = needed
        return simplejpeg.decode_jpeg(content, "RGB", min_height=height, min_width=width, min_factor=2)
    except ValueError:
        return None


def _decode_with_pillow(image: Any, needed: Sequence[int]) -> Any:
    """Decode an opened image (h, w, 3) and turn it upright; `needed` is width and height before turning."""
    import numpy as np
    from PIL import ImageOps

    image.draft("RGB", tuple(needed))  # JPEG: half, a quarter or an eighth of the size
    return np.asarray(to_rgb(ImageOps.exif_transpose(image)))


def crop_and_resize(
    pixels: Any, full: tuple[int, int], crop: Sequence[int], size: tuple[int, int], interpolation: str
) -> torch.Tensor:
    """Crop pixels (h, w, c) and resize the crop to uint8 (c, *size).

    `crop` is left, top, width and height in an image of `full` (width, height) pixels, of which `pixels` may be a smaller
    copy. Memory is channels last: torch's kernel for bytes takes half of Pillow's time on it, but twice on planes.
    """
    import numpy as np

    height, width = pixels.shape[:2]
    left, right = (round(x * width / full[0]) for x in (crop[0], crop[0] + crop[2]))
    top, bottom = (round(y * height / full[1]) for y in (crop[1], crop[1] + crop[3]))
    part = torch.from_numpy(np.array(pixels[top : max(bottom, top + 1), left : max(right, left + 1)])).permute(2, 0, 1)
    resize = torch.nn.functional.interpolate
    return resize(part.unsqueeze(0), size, mode=interpolation, antialias=True).squeeze(0)


def to_rgb(image: Any) -> Any:
    """Convert a Pillow image of any mode to RGB. 16 bits are scaled to 8: Pillow's conversion would clip them at 255."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    return image.convert("RGB")

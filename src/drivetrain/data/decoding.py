"""Image files to pixels, by libjpeg-turbo or Pillow: their range of values, and the handling of unreadable files."""

from __future__ import annotations

import io
import logging
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal, NamedTuple, Self, TypeVar

from annotated_types import Ge, Gt, Le, MaxLen, MinLen

from drivetrain.core.errors import DataError, each_read
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.options.option import Count
from drivetrain.core.step.source import CropBox, Source

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

OnError = Literal["raise", "skip"]
MaxSkipped = Annotated[float, Ge(0)]  # below 1: a share of the samples; else a number of them

Sample = TypeVar("Sample")


class NetworkError(DataError):
    """A sample could not be fetched. It is never skipped: the fault is not the sample's, and a later fetch may work."""

    at_once = True


LOOKED_AT = 5_000  # samples searched for further unreadable ones
SKIPPING = "{count} samples cannot be read: mend or remove them, or set data.on_error=skip data.max_skipped={count}"


class BadSamples:
    """The handling of samples that cannot be read. With on_error=raise the first ends the run; the error names the others too.

    With on_error=skip the next index that can be read replaces it, so every reader gets the same samples. Bad samples are marked
    in memory that worker processes share. Raises DataError once there are more than `max_skipped`: below 1 a share.
    """

    def __init__(self, on_error: OnError, max_skipped: float, samples: int) -> None:
        self.max_skipped = math.ceil(max_skipped * samples) if max_skipped < 1 else int(max_skipped)
        self.mend = SKIPPING if max_skipped else ""
        self.count, self.bad = samples, None if on_error == "raise" else torch.zeros(samples, dtype=torch.uint8).share_memory_()

    def read(self, index: int, read_sample: Callable[[int], Sample]) -> Sample:
        """Return `read_sample(index)`, or the sample that replaces a bad one."""
        if self.bad is None:
            try:
                return read_sample(index)
            except DataError as error:
                if not error.at_once:
                    others = (i for i in range(min(self.count, LOOKED_AT)) if i != index)
                    deque(each_read(chain([index], others), read_sample, self.mend), 0)
                raise
        count = len(self.bad)
        for candidate in (i % count for i in range(index, index + count)):
            if self.bad[candidate]:
                continue
            try:
                return read_sample(candidate)
            except NetworkError:
                raise
            except DataError as error:
                self.bad[candidate] = 1
                if (found := int(self.bad.sum())) > self.max_skipped:
                    raise DataError(
                        f"{found} of {count} samples cannot be read, data.max_skipped allows {self.max_skipped}; "
                        f"the last: {error}"
                    ) from None
        raise DataError(f"none of the {count} samples can be read (on_error=skip): mend the data")


BITS = (8, 10, 12, 14, 16)  # bits of instruments
SPREAD = 4  # a set whose values spread over less than 1 / SPREAD of the range does not use its depth

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Range:
    """The lowest and the highest value of a set of images, which become 0 and 255. Values beyond are clipped and counted."""

    low: float
    high: float
    said: bool = False  # set by the user: it also applies to images of 8 bits
    beyond: torch.Tensor = field(
        default_factory=lambda: torch.zeros(1, dtype=torch.int64).share_memory_(),
        compare=False,
        repr=False,
    )

    def __call__(self, values: np.ndarray, name: str) -> np.ndarray:
        """Return values (h, w, …) as uint8. Raises DataError for NaN."""
        scaled = np.asarray((values.astype(np.float32) - self.low) * (255 / (self.high - self.low)))
        lowest, highest = float(scaled.min()), float(scaled.max())
        if math.isnan(lowest):
            raise DataError(f"{name} has pixels that are no numbers (NaN): mend or remove it")
        if lowest < -0.5 or highest > 255.5:
            self.beyond.add_(1)
            count = int(self.beyond)
            if count == 10 ** (len(str(count)) - 1):  # log at powers of ten
                logger.warning(
                    "%d image%s had values beyond %g … %g, which are clipped, the last is %s with %g … %g: set "
                    "data.range=[low,high]",
                    count, "" if count == 1 else "s", self.low, self.high, name, values.min(), values.max(),
                )  # fmt: skip
        return np.asarray(np.rint(scaled.clip(0, 255)).astype(np.uint8))


def of_values(low: float, high: float, whole: bool, where: str) -> Range:
    """Return the range of images with values from `low` to `high`; `whole` is true for whole numbers.

    Raises DataError. Fractions from 0 or -1 to 1 keep that range. Whole numbers take the range of the bits that they nearly
    fill.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        raise DataError(f"{where} have pixels that are no finite numbers: mend them, or set data.range=[low,high]")
    if low == high:
        raise DataError(f"all pixels of {where} have the value {low:g}, so there is nothing to learn: mend them")
    if not whole and low >= -1 and high <= 1:
        return Range(0.0 if low >= 0 else -1.0, 1.0)
    depth = next((2**bits - 1 for bits in BITS if high < 2**bits), 0)
    if whole and low >= 0 and depth and (high - low) * SPREAD >= depth:
        return Range(0.0, float(depth))
    return Range(low, high)


CropShare = Annotated[float, Gt(0), Le(1)]
ImageSize = Count | Annotated[Sequence[Count], MinLen(2), MaxLen(2)]  # of both sides, or height and width


def sides(size: int | Sequence[int]) -> tuple[int, int]:
    """Return a size as height and width."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


ORIENTATION = 0x0112  # the EXIF tag
# The steps that bring an orientation upright: whether rows become columns, and then the direction of both.
TURNS = {1: (0, 1, 1), 2: (0, 1, -1), 3: (0, -1, -1), 4: (0, -1, 1), 5: (1, 1, 1), 6: (1, 1, -1), 7: (1, -1, -1), 8: (1, -1, 1)}
SMALLER = (1, 2, 4, 8)  # factors by which libjpeg can decode a smaller copy
METADATA, PIXELS = b"\xe1", b"\xda"  # segments of a JPEG
DAMAGED = "cannot be read as an image ({}): mend or remove it"


class Decoding(NamedTuple):
    """The settings by which the image files of a set become samples."""

    size: int | Sequence[int]  # of the upright RGB samples
    max_pixels: int = 50_000_000
    crop_pct: float = 1.0  # share of the side of the middle square, for a sample without a crop box
    on_error: OnError = "raise"
    max_skipped: float = 0.0

    @property
    def sides(self) -> tuple[int, int]:
        """Return their height and width."""
        return sides(self.size)


class ImageFileSource(Source):
    """A source that decodes an image file for each sample: uint8 (n, 3, h, w). Subclasses give the places of the files."""

    parallel_read = True  # threads share the decoding
    crops = True  # fetch takes crop boxes
    decodes_files = True  # a loader may decode the files itself (image_file_and_layout)
    range: Range | None = None  # of the values of files of more than 8 bits
    looked_at = 64  # files, spread evenly, that give this range

    def __init__(self, how: Decoding, targets: torch.Tensor) -> None:
        self.how, self.targets = how, targets  # (n, …)
        self.policy = BadSamples(how.on_error, how.max_skipped, len(targets))

    def __len__(self) -> int:
        return len(self.targets)

    @abstractmethod
    def content(self, index: int) -> bytes:
        """Return a sample's image file. Raises DataError naming the sample."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return a sample's name for messages."""

    def labels(self) -> torch.Tensor | None:
        """Return the classes (n,), if each image has one."""
        return None if self.targets.ndim > 1 or self.targets.is_floating_point() else self.targets

    def fetch(self, indices: torch.Tensor, boxes: Sequence[CropBox] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images, cropped to `boxes` where they are given, and their targets."""
        crops = [None] * len(indices) if boxes is None else boxes
        x = torch.empty(len(indices), 3, *self.how.sides, dtype=torch.uint8)
        read = []
        for row, (image, index) in enumerate(self.samples(indices.tolist(), crops)):
            x[row] = image
            read.append(index)
        return x, self.targets[read]

    def samples(self, indices: list[int], boxes: Sequence[CropBox | None]) -> Iterable[tuple[torch.Tensor, int]]:
        """Return the samples in the order of `indices`, each with the index that was read."""
        return map(self.sample, indices, boxes)

    def sample(self, index: int, box: CropBox | None = None) -> tuple[torch.Tensor, int]:
        """Return a sample's image, or its replacement's, uint8 (3, h, w), and the index that was read."""
        return self.policy.read(index, lambda candidate: (self.decoded(candidate, box), candidate))

    def decoded(self, index: int, box: CropBox | None = None) -> torch.Tensor:
        """Return the image of a sample itself, uint8 (3, h, w). Raises DataError naming it."""
        size, max_pixels, crop_pct, *_ = self.how
        return decode(self.content(index), self.name(index), size, max_pixels, box, crop_pct, self.range)

    def image_file(self, index: int) -> tuple[bytes, int]:
        """Return a sample's file, unchanged, and its index; if it cannot be decoded, its replacement's."""
        _, found = self.sample(index)
        return self.content(found), found

    def image_file_and_layout(self, index: int, box: CropBox | None = None) -> tuple[bytes, WantedPart, int]:
        """Return a sample's file, layout and index for a loader that decodes files itself.

        A file whose header cannot be read is replaced; the index is then the replacement's.
        """

        def read(candidate: int) -> tuple[bytes, WantedPart, int]:
            content = self.content(candidate)
            layout = read_layout(content, self.name(candidate), self.how.max_pixels, box, self.how.crop_pct, self.how.size)
            plain = layout.plain_jpeg and not (self.range is not None and self.range.said)
            return content, layout._replace(plain_jpeg=plain), candidate

        return self.policy.read(index, read)

    def subset(self, indices: torch.Tensor) -> Self:
        """Return a source of some of the samples. An unreadable one is replaced by another one of these."""
        made = copy(self)
        made.select(indices)
        made.policy = BadSamples(self.how.on_error, self.how.max_skipped, len(indices))
        return made

    def select(self, indices: torch.Tensor) -> None:
        """Keep only these samples (n,), in this order."""
        self.targets = self.targets[indices]

    def skipped(self) -> list[str]:
        """Return the names of the samples that were replaced."""
        return [] if self.policy.bad is None else [self.name(i) for i in self.policy.bad.nonzero().flatten().tolist()]


class WantedPart(NamedTuple):
    """The size in an image file's header, and the wanted part of the image."""

    size: tuple[int, int]  # width and height of the upright image
    crop: tuple[int, int, int, int]  # left, top, width and height of the wanted part, in the upright image
    orientation: int  # EXIF's: 1 is upright, from 5 on width and height are swapped
    plain_jpeg: bool  # an upright JPEG in RGB or grey


def read_layout(
    content: bytes, name: str, max_pixels: int, box: CropBox | None = None, crop_pct: float = 1.0, shape: int | Sequence[int] = 1
) -> WantedPart:
    """Read an image file's layout; without `box` the crop is in the middle, with the aspect ratio of `shape`.

    Raises DataError where the image is too large.
    """
    if (size := _plain_jpeg_size(content)) is not None:
        orientation, plain = 1, True
        check_pixels(size, name, max_pixels)
    else:
        with open_image(content, name) as image:
            size, orientation = image.size, orientation_of(image, name, max_pixels)
            plain = image.format == "JPEG" and image.mode in ("RGB", "L") and orientation == 1
    upright = size[::-1] if orientation >= 5 else size
    return WantedPart(
        upright, center_part(upright[0], upright[1], crop_pct, shape) if box is None else box(*upright), orientation, plain
    )


def check_pixels(size: tuple[int, int], name: str, max_pixels: int) -> None:
    """Raise DataError for an image of too many pixels."""
    if size[0] * size[1] > max_pixels:
        raise DataError(f"{name} has {size[0]}×{size[1]} pixels, over data.max_pixels={max_pixels}")


def orientation_of(image: ImageFile, name: str, max_pixels: int) -> int:
    """Return the orientation in an opened image's EXIF or XMP, 1 (upright) to 8. Raises DataError for too many pixels."""
    check_pixels(image.size, name, max_pixels)  # first, because a PNG's EXIF may follow its pixels
    found = image.getexif().get(ORIENTATION, 1)
    return found if found in TURNS else 1


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return pixels (h, w, …) turned upright: a view."""
    swapped, rows, columns = TURNS[orientation]
    turned = pixels.swapaxes(0, 1) if swapped else pixels
    return turned[::rows, ::columns]


def _plain_jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Return width and height of a JPEG in colour or grey without EXIF; None for other files, which Pillow reads (10× slower)."""
    import simplejpeg

    if content[:2] != b"\xff\xd8" or _has_metadata(content):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        return None
    return (width, height) if colours in ("YCbCr", "RGB", "Gray", "GRAY") else None


def _has_metadata(content: bytes) -> bool:
    """True if a JPEG has EXIF or XMP in any segment before its pixels, or odd segments."""
    at = 2
    while content[at : at + 1] == b"\xff" and (kind := content[at + 1 : at + 2]) not in (METADATA, b""):
        if kind == PIXELS:
            return False
        at += 2 + int.from_bytes(content[at + 2 : at + 4], "big")
    return True


@contextmanager
def open_image(content: bytes | BinaryIO, name: str) -> Iterator[ImageFile]:
    """Open an image file with Pillow. Any failure while it is open becomes a DataError with the file's name."""
    from PIL import Image as pillow
    from PIL import UnidentifiedImageError

    try:
        with pillow.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
            yield image
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{name} {DAMAGED.format('it has no format that Pillow knows')}") from None
    except Exception as error:  # a damaged file can make an image library fail in any way
        raise DataError(f"{name} {DAMAGED.format(error)}") from None


def decode(
    content: bytes,
    name: str,
    size: int | Sequence[int],
    max_pixels: int,
    box: CropBox | None = None,
    crop_pct: float = 1.0,
    scale: Range | None = None,
) -> torch.Tensor:
    """Decode an image file, crop it to `box` or in its middle, and resize it: uint8 (3, h, w).

    `scale` is the range of its values, which a file of more than 8 bits needs. Memory is channels last. Raises DataError with
    the file's name.
    """
    layout = read_layout(content, name, max_pixels, box, crop_pct, size)
    return decode_crop(content, name, layout, size, "bilinear" if box is None else box.interpolation, scale)


def decode_crop(
    content: bytes, name: str, layout: WantedPart, size: int | Sequence[int], interpolation: str, scale: Range | None = None
) -> torch.Tensor:
    """Decode the crop of an image file whose layout is known: uint8 (3, h, w). Raises DataError with the file's name."""
    whole, crop, orientation, plain = layout
    # The smallest width and height to decode at that still gives the crop its pixels.
    each = zip(sides(size)[::-1], whole, crop[2:], strict=True)
    needed = [math.ceil(pixels * side / part) for pixels, side, part in each]
    pixels = _decode_jpeg(content, needed) if plain else None
    if pixels is None:
        with open_image(content, name) as image:
            image.draft(
                "RGB", (needed[1], needed[0]) if orientation >= 5 else (needed[0], needed[1])
            )  # JPEG: a half, a quarter or an eighth
            pixels = upright(pixels_of(image, name, scale), orientation)
    elif scale is not None and scale.said:
        pixels = scale(pixels, name)
    return crop_and_resize(pixels, whole, crop, sides(size), interpolation)


def center_part(width: int, height: int, share: float = 1.0, size: int | Sequence[int] = 1) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a share of the largest middle part with the aspect ratio of `size`."""
    high, wide = (side // math.gcd(*sides(size)) for side in sides(size))
    scale = min(width / wide, height / high) * share
    wide, high = max(1, round(wide * scale)), max(1, round(high * scale))
    return (width - wide) // 2, (height - high) // 2, wide, high


def _decode_jpeg(content: bytes, needed: Sequence[int]) -> np.ndarray | None:
    """Decode a JPEG (h, w, 3) at half, a quarter or an eighth of its size where that is at least `needed` (width, height).

    Returns None for a file that libjpeg-turbo refuses, which is left to Pillow. On photographs of 500×400 pixels it takes 1.0 ms,
    and Pillow 1.4 ms.
    """
    import simplejpeg

    try:
        width, height = needed
        return np.asarray(simplejpeg.decode_jpeg(content, "RGB", min_height=height, min_width=width, min_factor=2))
    except ValueError:
        return None


def crop_and_resize(
    pixels: np.ndarray, full: tuple[int, int], crop: Sequence[int], size: tuple[int, int], interpolation: str
) -> torch.Tensor:
    """Crop pixels (h, w, c) and resize the crop to uint8 (c, *size).

    `crop` is left, top, width and height in an image of `full` (width, height) pixels; `pixels` may be a smaller copy: a JPEG
    decoded at a half, a quarter or an eighth. Memory is channels last: on it torch's kernel for bytes takes half of Pillow's
    time, on planes twice. Pillow resizes crops that begin or end within a pixel of the copy.
    """
    from PIL import Image as pillow

    height, width = pixels.shape[:2]
    factor = min(SMALLER, key=lambda each: abs(-(-full[0] // each) - width) + abs(-(-full[1] // each) - height))
    left, top = crop[0] / factor, crop[1] / factor
    right, bottom = min(left + crop[2] / factor, width), min(top + crop[3] / factor, height)
    if all(edge.is_integer() for edge in (left, top, float(right), float(bottom))):
        part = torch.from_numpy(np.array(pixels[int(top) : int(bottom), int(left) : int(right)])).permute(2, 0, 1)
        resize = torch.nn.functional.interpolate
        return resize(part.unsqueeze(0), size, mode=interpolation, antialias=True).squeeze(0)
    kind = pillow.Resampling.BICUBIC if interpolation == "bicubic" else pillow.Resampling.BILINEAR
    whole = pillow.fromarray(np.ascontiguousarray(pixels))
    return torch.from_numpy(np.array(whole.resize(size[::-1], kind, (left, top, right, bottom)))).permute(2, 0, 1)


def pixels_of(image: ImageFile, name: str, scale: Range | None, mode: str = "RGB") -> np.ndarray:
    """Return an opened image's pixels, uint8 (h, w, 3), or (h, w) with the mode L.

    Values of more than 8 bits become 0 to 255 by their range; values of 8 bits do so only if the user sets the range. Raises
    DataError for more bits without a range.
    """
    from PIL import Image as pillow

    values = values_of(image)
    if values is None and (scale is None or not scale.said):
        return np.asarray(image.convert(mode))
    if scale is None:
        raise DataError(
            f"{name} has numbers of more than 8 bits, and their black and white are unknown: set data.range=[low,high]"
        )
    pixels = scale(np.asarray(image.convert("RGB")) if values is None else values, name)
    return np.asarray(pillow.fromarray(pixels).convert(mode))


def values_of(image: ImageFile) -> np.ndarray | None:
    """Return the numbers (h, w) or (h, w, 3) of an opened image of more than 8 bits; None for one of 8 bits.

    Pillow keeps only the upper 8 of 16 bits of colours, so torchvision reads these. Raises DataError where it cannot.
    """
    if image.mode[0] in "IF":
        return np.asarray(image)
    how = image.tile[0][3] if image.tile else ""
    if ";16" not in str(how[0] if isinstance(how, tuple) else how):
        return None
    if image.format != "PNG":
        raise DataError(f"a {image.format} of colours with 16 bits each is not read: save it as PNG")
    from torchvision.io import decode_png

    assert image.fp is not None
    image.fp.seek(0)
    values = decode_png(torch.frombuffer(bytearray(image.fp.read()), dtype=torch.uint8)).numpy()
    return np.asarray(values[:3].transpose(1, 2, 0) if len(values) > 2 else values[0])

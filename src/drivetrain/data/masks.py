"""Images with masks: a class for each pixel."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from drivetrain.core.errors import DataError, OperatorGives, UserError, each_read
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.options.allowed import FileName
from drivetrain.core.options.option import Count, CountOrZero, RunSpec
from drivetrain.core.step.source import CropBox
from drivetrain.data import listing
from drivetrain.data.base import IGNORE_INDEX, Fraction, HeldOut, Splits, hash_fractions
from drivetrain.data.decoding import (
    Decoding,
    ImageSize,
    WantedPart,
    decode_crop,
    open_image,
    orientation_of,
    read_layout,
    sides,
    upright,
)
from drivetrain.data.images import ImageData, Images
from drivetrain.data.listing import IMAGES
from drivetrain.data.untrusted import ordinary, read_image_file

MASKS = (".png", ".bmp", ".gif", ".tif", ".tiff")  # lossless formats: a JPEG changes pixel values
MOST_VALUES, MOST_COLOURS = 150, 256  # of all masks: more numbers come from soft edges; more colours are not listed
SPARSE = 4  # a largest value above so many times their count: values are no class numbers
LOOKED_AT = 64  # masks, where the user lists their values
THREADS = 4
COLOUR = 1 << 24  # added to a colour's number, red × 65536 + green × 256 + blue, so that it is no plain value

Pair = tuple[str, str]  # the paths of an image and of its mask
Size = tuple[int, int]  # width and height


Known = tuple["MaskReading", Sequence[str]]  # how masks are read, and what looks wrong


@dataclass(kw_only=True, eq=False)
class Masks(ImageData, HeldOut["MaskedImages", Known, "MaskedImages"]):
    """Images and their masks: `root` holds the folders `images` and `masks`, whose files have the same names.

    The classes follow from the values in all masks, or `values` lists them in the order of the classes. Pixels of the
    value `ignore` do not count where the other values are class numbers. Image and mask have one geometry: both are turned
    upright, cropped in their middle to the shape of `size` and resized to it, the mask by the nearest pixel. The share
    `holdout` of the images is held out, chosen by the hash of their names.
    """

    machine_local_keys = ("root",)
    remedy: ClassVar[str] = "add images, or set data.holdout"
    targets = "mask"

    root: str | None = None
    images: FileName = "images"
    masks: FileName = "masks"
    classes: Count | None = None
    values: Sequence[CountOrZero | Sequence[CountOrZero]] | None = None
    ignore: CountOrZero | None = 255
    validation: Fraction | None = 0.1
    size: ImageSize = 128

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not self.root:
            yield OperatorGives(f"data=masks needs data.root, the folder that holds {self.images}/ and {self.masks}/")
            return
        for setting, name in (("images", self.images), ("masks", self.masks)):
            if not (Path(self.root) / name).is_dir():
                yield f"data.root={self.root} has no folder {name} (data.{setting}): it must hold images and masks of equal names"
        if self.values is not None:
            given = [list(v) if isinstance(v, Sequence) else v for v in self.values]
            if any(isinstance(v, list) and (len(v) != 3 or max(v) > 255) for v in given):
                yield f"data.values={given}: a colour is three numbers in brackets (red, green, blue), each from 0 to 255"
            if len({isinstance(v, list) for v in given}) != 1 or any(given.count(v) > 1 for v in given):
                yield f"data.values={given}: list the numbers or the colours of the classes, each once"
            if self.classes not in (None, len(given)):
                yield f"data.classes={self.classes}, but data.values lists {len(given)}: leave data.classes out"

    def decodes_images(self) -> bool:
        return False  # a loader that decodes files itself does not read masks

    def read(self) -> tuple[MaskedImages, Known]:
        return self._found([])

    def fractions(self, every: MaskedImages) -> np.ndarray:
        return hash_fractions((_name_of(image.partition("/")[2]) for image in every.paths), len(every.paths))

    def about(self, known: Known, sources: Sequence[tuple[str, MaskedImages]], own: Splits | None) -> dict[str, object]:
        reading, doubts = known
        looked = self.looked_at(sources, own, reading.found, doubts=doubts)
        names = [_named(value) for value in reading.values]
        return {"shape": self.shape(), "classes": len(names), "names": names, **looked}

    def load_whole(self, own: Splits) -> Splits:
        every, known = self._found([_number(name) for name in own.names or ()])
        return self.judged(known, {"": every}, own, {"test": "the whole folder"})

    def _found(self, values: Sequence[int]) -> tuple[MaskedImages, Known]:
        """Return all pairs, and how their masks are read. `values` are the classes' values, where a run knows them."""
        pairs, doubts = self._pairs()
        reading = self._reading(pairs, values)
        return MaskedImages(str(self.root), pairs, self.how(), reading), (reading, doubts)

    def _pairs(self) -> tuple[list[Pair], list[str]]:
        """Return each image and its mask by their common name, in the order of names, and doubts about them. Raises UserError."""
        (images, doubts), (masks, more) = self._files(self.images, IMAGES), self._files(self.masks, MASKS)
        if alone := sorted(set(images) ^ set(masks)):
            raise UserError(
                f"{self.root}: {len(alone)} files have no partner of the same name in {self.images}/ and {self.masks}/, the "
                f"first is {alone[0]} (a mask is a {', '.join(MASKS)} file)"
            )
        if not images:
            raise UserError(f"no image in {self.root}/{self.images}")
        return [(images[name], masks[name]) for name in sorted(images)], [*doubts, *more]

    def _files(self, folder: str, endings: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """Return the files of a folder by the common name of image and mask, and doubts about them. Raises UserError."""
        found: dict[str, str] = {}
        listed = listing.walk(os.path.join(str(self.root), folder), endings)
        for path in listed.every():
            name = _name_of(path)
            if name in found:
                raise UserError(f"{self.root}/{folder}: {found[name]} and {path} have one name, and a pair has one: remove one")
            found[name] = path
        doubts = listing.doubts(f"{self.root}/{folder}", listed)
        return {name: f"{folder}/{path}" for name, path in found.items()}, doubts

    def _reading(self, pairs: Sequence[Pair], known: Sequence[int] = ()) -> MaskReading:
        """Return how these masks are read: the classes of their values, and whether they turn with their images.

        Raises UserError.
        """
        given = known or [_number(value) for value in self.values or ()]
        numbered = not known and self.classes is not None
        coloured = any(value >= COLOUR for value in given)
        looked = pairs[:: max(1, len(pairs) // LOOKED_AT)] if given or numbered else pairs

        def look(pair: Pair) -> Look | DataError:
            image, mask = (os.path.join(str(self.root), path) for path in pair)
            try:
                return _look(image, mask, self.max_pixels, coloured)
            except DataError as error:
                return error

        def good(found: Look | DataError) -> Look:
            if isinstance(found, DataError):
                raise found
            return found

        with ThreadPoolExecutor(THREADS) as pool:
            looks = list(each_read(pool.map(look, looked), good, "{count} pairs cannot be read: mend or remove them"))
        shares: Counter[int] = sum((each.pixels for each in looks), Counter())
        if not given:
            palettes = all(each.palette for each in looks)
            given = classes_of(sorted(shares), self.ignore, palettes, self.classes, f"{self.root}/{self.masks}")
        ignore = None if self.ignore in given else self.ignore
        if unknown := sorted(set(shares) - {*given, ignore}):
            raise UserError(
                f"{self.root}/{self.masks}: masks have the values {', '.join(map(_named, unknown[:10]))}, and the "
                f"{'run knows' if known else 'classes are'} {', '.join(map(_named, given[:10]))}: set data.values or data.ignore"
            )
        found = _described(shares, given, ignore)
        return MaskReading(tuple(given), ignore, self.max_pixels, _turning(looks), found)


def _name_of(path: str) -> str:
    """Return the common name of an image and its mask: the path in their folder, without the ending."""
    return listing.one_form(path.rpartition(".")[0])


def classes_of(found: Sequence[int], ignore: int | None, palettes: bool, classes: int | None, where: str) -> list[int]:
    """Return the value of each class of masks that hold these values, in order. Raises DataError where the values leave it open.

    Two values, 0 and another, are two classes. Small numbers are class numbers, and `ignore` among them does not count.
    """
    kept = [value for value in found if value != ignore]
    some = ", ".join(_named(value) for value in found[:10]) + (", …" if len(found) > 10 else "")
    given = "" if classes is None else f", and data.classes={classes}"
    if found[-1] >= COLOUR:
        plain = [value - COLOUR if value >= COLOUR else 0x10101 * value for value in found]  # greys among colours are colours
        colours = sorted({(value >> 16, value >> 8 & 255, value & 255) for value in plain})
        listed = str(list(map(list, colours))).replace(" ", "") if len(colours) <= 20 else "[[R,G,B],…]"
        what = (
            f"set data.values={listed}, in the order of the classes" if len(colours) <= MOST_COLOURS else "which are no classes"
        )
        raise DataError(f"{where}: masks have {len(colours):,} colours, {what}")
    if found[0] < 0:
        raise DataError(f"{where}: masks have values below 0 ({some}): set data.values to those that are classes, in their order")
    if len(found) == 2 and found[0] == 0 and classes in (None, 2) and (not palettes or found[1] == 255):
        return list(found)
    if classes is not None and (not kept or kept[-1] >= classes or len(kept) < len(found) == 2):
        raise DataError(f"{where}: masks have the values {some}{given}: set data.classes, data.values or data.ignore")
    if classes is not None:
        return list(range(classes))
    if len(kept) < 2:
        raise DataError(
            f"{where}: the masks have nothing but {some}, so there is nothing to learn: mend them, or set data.values"
        )
    if len(found) > MOST_VALUES:
        raise DataError(
            f"{where}: masks have {len(found)} values ({some}), as soft edges have: save them without smoothing, or set "
            "data.classes, if they are class numbers"
        )
    if not palettes and kept[-1] >= SPARSE * len(kept):
        raise DataError(f"{where}: masks have the values {some}, which are no class numbers: set data.values=[…] in their order")
    return list(range(kept[-1] + 1))


def _described(pixels: Counter[int], values: Sequence[int], ignore: int | None) -> str:
    """Return the values that were found, each with its class, in words."""
    total, numbers = pixels.total(), {value: number for number, value in enumerate(values)}
    parts = [
        f"{_named(value)} is {'ignored' if value == ignore else f'class {numbers[value]}'} ({100 * count / total:.3g} %)"
        for value, count in sorted(pixels.items())
        if value in numbers or value == ignore
    ]
    absent = [_named(value) for value in values if value not in pixels]
    more = ", …" if len(parts) > 12 else ""
    return f"masks: {', '.join(parts[:12])}{more}" + (f", none is {', '.join(absent[:10])}" if absent else "")


class Look(NamedTuple):
    """The properties of a mask and its image."""

    pixels: Counter[int]  # value → number of pixels
    palette: bool
    name: str  # of the image
    turns: bool | None  # whether the mask is stored as the image is, and turns with it; None: their sizes do not show it
    turned: bool  # whether the image is turned at all


def _look(image: str, mask: str, max_pixels: int, coloured: bool) -> Look:
    """Look at a pair. Raises DataError, also where their shapes differ."""
    values, palette = _values(read_image_file(mask, max_pixels), mask, max_pixels, coloured)
    low, high = int(values.min()), int(values.max())
    counts = np.bincount((values - low).ravel()) if high - low < 1 << 16 else None
    found = np.unique(values, return_counts=True) if counts is None else (counts.nonzero()[0] + low, counts[counts > 0])
    with open(image, "rb", opener=ordinary) as file, open_image(file, image) as opened:
        size, orientation = opened.size, orientation_of(opened, image, max_pixels)
    whole = size[::-1] if orientation >= 5 else size
    pixels = Counter(dict(zip(found[0].tolist(), found[1].tolist(), strict=True)))
    return Look(pixels, palette, image, _turns(values.shape[::-1], whole, orientation, image), orientation > 1)


def _turning(looks: Iterable[Look]) -> bool | None:
    """Return whether masks whose sizes leave it open turn with their images, as in the other pairs; None if no mask needs it."""
    told = {look.turns for look in looks if look.turned} - {None}
    untold = [look.name for look in looks if look.turned and look.turns is None]
    if untold and len(told) != 1:
        raise DataError(
            f"{len(untold)} images are turned by their EXIF, and nothing shows whether their masks are, the first is "
            f"{untold[0]}: save the images upright, or without that tag"
        )
    return told.pop() if len(told) == 1 else None


def _turns(mask: Size, whole: Size, orientation: int, name: str) -> bool | None:
    """Return whether a mask is turned like its image, of upright size `whole`.

    Raises DataError where it fits neither way.
    """
    upright_fits = _alike(mask, whole)
    stored_fits = _alike(mask, whole[::-1]) if orientation >= 5 else upright_fits
    if not (upright_fits or stored_fits):
        raise DataError(
            f"{name} is {whole[0]}×{whole[1]} and its mask {mask[0]}×{mask[1]}, which is another shape: they must show the same"
        )
    return None if orientation == 1 or upright_fits == stored_fits else stored_fits


def _alike(one: Size, other: Size) -> bool:
    """True if two sizes have the same aspect ratio, up to the rounding of a resized copy."""
    return 2 * abs(one[0] * other[1] - one[1] * other[0]) < max(sum(one), sum(other))


@dataclass(frozen=True)
class MaskReading:
    """The settings by which the masks of a set are read."""

    values: tuple[int, ...]  # of the classes
    ignore: int | None  # a value that does not count
    max_pixels: int
    turns: bool | None  # whether a mask is stored like its image, where its size does not show it
    found: str = ""  # their values in words

    def read(self, path: str, image: str, layout: WantedPart, size: int | Sequence[int]) -> torch.Tensor:
        """Return a mask, int64 (h, w), of the part of its image that the layout says. Raises DataError."""
        values, _ = _values(read_image_file(path, self.max_pixels), path, self.max_pixels, self.values[0] >= COLOUR)
        whole, (left, top, width, height), orientation, _ = layout
        turns = _turns(values.shape[::-1], whole, orientation, image)
        if turns is None and orientation > 1 and self.turns is None:
            raise DataError(f"{image} is turned by its EXIF, and nothing shows whether {path} is: save the image upright")
        if self.turns if turns is None else turns:
            values = upright(values, orientation)
        down, across = ((np.arange(side) + 0.5) / side for side in sides(size))
        rows = (top + down * height) * values.shape[0] / whole[1]
        columns = (left + across * width) * values.shape[1] / whole[0]
        return self._classes(values[rows.astype(np.int64)][:, columns.astype(np.int64)], path)

    def _classes(self, values: np.ndarray, path: str) -> torch.Tensor:
        """Return the classes of values (h, w)."""
        known = [*self.values, *([] if self.ignore is None else [self.ignore])]
        classes = np.array([*range(len(self.values)), IGNORE_INDEX][: len(known)])
        order = np.argsort(known)
        place = np.searchsorted(np.array(known)[order], values).clip(max=len(known) - 1)
        if (wrong := values[np.array(known)[order][place] != values]).size:
            raise DataError(
                f"{path} has the value {_named(int(wrong[0]))}, which is no class of the other masks: mend it, or set "
                "data.values, data.classes or data.ignore"
            )
        return torch.from_numpy(classes[order][place])


class MaskedImages(Images):
    """Images and their masks as a source: uint8 (n, 3, h, w) and int64 (n, h, w)."""

    crops = False  # random crops are not tried with masks
    decodes_files = False

    def __init__(self, root: str, pairs: Sequence[Pair], how: Decoding, reading: MaskReading) -> None:
        super().__init__(root, [image for image, _ in pairs], torch.arange(len(pairs)), how)
        self.masks, self.reading = [mask for _, mask in pairs], reading

    def labels(self) -> None:
        return None  # a class for each pixel, none for the sample

    def select(self, indices: torch.Tensor) -> None:
        super().select(indices)
        self.masks = [self.masks[i] for i in indices.tolist()]

    def identities(self) -> list[str]:
        """Return the images' paths in the folder."""
        return list(self.paths)

    def fetch(self, indices: torch.Tensor, boxes: Sequence[CropBox] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        images, masks, size = list[torch.Tensor](), list[torch.Tensor](), self.how.size
        for index, box in zip(indices.tolist(), [None] * len(indices) if boxes is None else boxes, strict=True):
            content, name = self.content(index), self.name(index)
            layout = read_layout(content, name, self.how.max_pixels, box, shape=size)
            masks.append(self.reading.read(os.path.join(self.root, self.masks[index]), name, layout, size))
            interpolation = "bilinear" if box is None else box.interpolation
            images.append(decode_crop(content, name, layout, size, interpolation, self.range))
        return torch.stack(images), torch.stack(masks)


def _values(content: bytes, name: str, max_pixels: int, coloured: bool) -> tuple[np.ndarray, bool]:
    """Return a mask's values, int64 (h, w), and whether they are indices of a palette. Raises DataError.

    Colours become whole numbers from COLOUR on, except greys where masks are not `coloured`.
    """
    with open_image(content, name) as image:
        turned = orientation_of(image, name, max_pixels)
        palette = image.mode in ("P", "PA") and not coloured
        if "A" in image.getbands() and len(set(image.getchannel("A").getextrema())) > 1:
            raise DataError(
                f"{name} is transparent in parts: a mask has one number or colour for each pixel, and no transparency"
            )
        if image.mode in ("CMYK", "YCbCr", "LAB", "HSV"):
            raise DataError(f"{name} is a {image.mode} image: a mask has one number or colour for each pixel")
        colours = coloured or image.mode in ("RGB", "RGBA")
        pixels = np.asarray(image.convert("RGB") if colours else image)
    if colours:
        values = _numbers_of(pixels, coloured)
    else:
        values = (pixels[..., 0] if pixels.ndim > 2 else pixels).astype(np.int64)
        if pixels.dtype.kind == "f" and not (values == pixels).all():
            raise DataError(f"{name} has fractions: a mask has one whole number or colour for each pixel")
    return upright(values, turned), palette


def _numbers_of(pixels: np.ndarray, coloured: bool) -> np.ndarray:
    """Return the number of each pixel's colour (h, w, 3); the grey value where all are grey and masks are not `coloured`."""
    red, green, blue = (pixels[..., channel].astype(np.int64) for channel in range(3))
    if not coloured and (red == green).all() and (green == blue).all():
        return red
    return COLOUR + (red << 16) + (green << 8) + blue


def _number(value: Any) -> int:
    """Return the number of a value: one given by the user, or the name of a run's class. Raises UserError."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        red, green, blue = value
        return COLOUR + (int(red) << 16) + (int(green) << 8) + int(blue)
    try:
        return COLOUR + int(value[1:], 16) if str(value).startswith("#") else int(value)
    except ValueError:
        raise UserError(f"the run's classes are not the values of masks, such as {value!r}") from None


def _named(value: int) -> str:
    """Return a mask's value as text: a number, or a colour as #rrggbb."""
    return f"#{value - COLOUR:06x}" if value >= COLOUR else str(value)

"""Image files with targets beside them: masks, or the rows of a table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from drivetrain.core.allowed import ColumnName, FileName, one_of
from drivetrain.core.errors import DataError, OperatorGives, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, CountOrZero, RunSpec
from drivetrain.core.order import Sampling
from drivetrain.core.source import CropBox
from drivetrain.core.targets import TargetKind
from drivetrain.data.bad_samples import MaxSkipped, OnError
from drivetrain.data.base import IGNORE_INDEX, WHOLE, Data, Fraction, Sets, Splits, beside, hash_fraction
from drivetrain.data.columns import Columns, column, held_out, missing, number_of_rows, read_columns, rows_of
from drivetrain.data.decoding import CropShare, center_square, open_image
from drivetrain.data.images import IMAGES, Images, Normalization, image_normalization
from drivetrain.data.named_sets import expanded
from drivetrain.data.targets import TargetReader
from drivetrain.data.untrusted import number_of_classes, read_image_file

MASKS = (".png", ".bmp", ".gif", ".tif", ".tiff")  # without loss: a JPEG's pixels are no classes
TableKind = Literal["class", "labels", "values"]
Separator = Annotated[str, one_of(",", ";", "|", "/", " ")]


class Masks(Data):
    """Images and their masks: `root` holds the folders `images` and `masks`, whose files have the same names.

    A mask is an image of the same size whose pixels are class numbers; pixels of the value `ignore` do not count. Image and
    mask are cropped to the largest square in their middle and resized to `size`, the mask by the nearest pixel. The share
    `holdout` of the images is held out, chosen by the hash of their names.
    """

    machine_local_keys = ("root",)
    targets = "mask"

    def __init__(
        self,
        root: str | None = None,
        images: FileName = "images",
        masks: FileName = "masks",
        classes: Count | None = None,
        ignore: CountOrZero | None = 255,
        size: Count = 128,
        holdout: Fraction = 0.1,
        validation: Fraction | None = 0.1,
        normalize: Normalization = "imagenet",
        max_pixels: Count = 50_000_000,
        drop_last: bool = True,
        order: Sampling = "shuffled",
    ) -> None:
        self.root = os.path.expanduser(root) if root else None
        self.images, self.masks, self.classes, self.ignore, self.size = images, masks, classes, ignore, size
        self.holdout, self.validation, self.normalize = holdout, validation, normalize
        self.max_pixels, self.drop_last, self.order = max_pixels, drop_last, order

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.root:
            yield OperatorGives(f"data=masks needs data.root, the folder that holds {self.images}/ and {self.masks}/")
            return
        for knob, name in (("images", self.images), ("masks", self.masks)):
            if not (Path(self.root) / name).is_dir():
                yield f"data.root={self.root} has no folder {name} (data.{knob}): it must hold images and masks of the same names"

    def shape(self) -> tuple[int, ...]:
        return (3, self.size, self.size)

    def load(self, device: torch.device) -> Splits:
        pairs = self._pairs(Path(str(self.root)))
        apart = {name for name in pairs if hash_fraction(name) < self.holdout}
        train, test = ([pairs[name] for name in pairs if (name in apart) is held] for held in (False, True))
        if not train or not test:
            raise UserError(
                f"{self.root} gives {len(train)} training and {len(test)} test images: add images, or set data.holdout"
            )
        classes = self.classes or self._count_classes([mask for _, mask in pairs.values()])
        sources = [MaskedImages(files, self.size, self.max_pixels, classes, self.ignore) for files in (train, test)]
        return Splits(sources[0], sources[1], self.shape(), classes, image_normalization(self.normalize, sources[0]))

    def load_whole(self, own: Splits) -> Splits:
        pairs = list(self._pairs(Path(str(self.root))).values())
        if (found := self._count_classes([mask for _, mask in pairs])) > own.classes:
            raise UserError(f"{self.root} has masks with the class {found - 1}, and the run knows 0 to {own.classes - 1}")
        every = MaskedImages(pairs, self.size, self.max_pixels, own.classes, self.ignore)
        return Splits(every, every, self.shape(), own.classes, own.normalize, origins={"test": "the whole folder"})

    def _pairs(self, root: Path) -> dict[str, tuple[Path, Path]]:
        """Return each image and its mask by their common name, in the order of names. Raises UserError."""
        images, masks = (
            {_stem(p, root / folder): p for p in (root / folder).rglob("*") if p.suffix.lower() in known}
            for folder, known in ((self.images, IMAGES), (self.masks, MASKS))
        )
        if alone := sorted(set(images) ^ set(masks)):
            raise UserError(
                f"{root}: {len(alone)} files have no partner of the same name in {self.images}/ and {self.masks}/, the first is "
                f"{alone[0]} (a mask is a {', '.join(MASKS)} file)"
            )
        if not images:
            raise UserError(f"no image in {root / self.images}")
        return {name: (images[name], masks[name]) for name in sorted(images)}

    def _count_classes(self, masks: Sequence[Path]) -> int:
        """Return the largest class of all masks + 1."""
        highest = 0
        for path in masks:
            classes = read_mask(path, None, self.max_pixels)
            counted = classes if self.ignore is None else classes[classes != self.ignore]
            highest = max(highest, int(counted.max()) if counted.numel() else 0)
        return number_of_classes(highest, len(masks) * self.size**2, None, str(self.root))


def _stem(path: Path, folder: Path) -> str:
    """Return what an image and its mask have in common."""
    return path.relative_to(folder).with_suffix("").as_posix()


class MaskedImages(Images):
    """Images and their masks as a source: uint8 (n, 3, size, size) and int64 (n, size, size)."""

    crops = False  # a crop would have to be the mask's too
    decodes_files = False  # a loader that decodes files itself does not read masks

    def __init__(self, files: Sequence[tuple[Path, Path]], size: int, max_pixels: int, classes: int, ignore: int | None) -> None:
        super().__init__([(image, row) for row, (image, _) in enumerate(files)], size, max_pixels)
        self.masks, self.classes, self.ignore = [mask for _, mask in files], classes, ignore

    def labels(self) -> None:
        return None  # there is one for each pixel

    def fetch(self, indices: torch.Tensor, boxes: Sequence[CropBox] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        x, rows = super().fetch(indices, boxes)
        return x, torch.stack([self.mask(row) for row in rows.tolist()])

    def mask(self, index: int) -> torch.Tensor:
        """Return a sample's mask, int64 (size, size). Raises DataError naming its file."""
        mask = read_mask(self.masks[index], self.size, self.max_pixels)
        if self.ignore is not None:
            mask = mask.masked_fill(mask == self.ignore, IGNORE_INDEX)
        if int(mask.max()) >= self.classes:
            raise DataError(
                f"{self.masks[index]} has the class {int(mask.max())}, and data.classes={self.classes}: set data.classes or "
                "data.ignore"
            )
        return mask


def read_mask(path: Path, size: int | None, max_pixels: int) -> torch.Tensor:
    """Read a mask, int64 (h, w); with `size` its largest square, resized by the nearest pixel. Raises DataError."""
    import numpy as np

    with open_image(read_image_file(path, max_pixels), str(path)) as image:
        if image.width * image.height > max_pixels:
            raise DataError(f"{path} has {image.width}×{image.height} pixels, over data.max_pixels={max_pixels}")
        if image.mode in ("RGB", "RGBA", "CMYK", "YCbCr"):
            raise DataError(f"{path} is a {image.mode} image: a mask has one number for each pixel (modes L, P, I or 1)")
        pixels = torch.from_numpy(np.array(image).astype(np.int64))
    if size is None:
        return pixels
    left, top, side, _ = center_square(pixels.shape[1], pixels.shape[0])
    nearest = ((torch.arange(size) + 0.5) * side / size).long()
    return pixels[top + nearest][:, left + nearest]


class LabelsCsv(Data):
    """Images, and a table beside them with a row for each: its file, and a class, several labels, or numbers.

    The share `holdout` of the rows is held out, chosen by the hash of their content, unless there is a table for the test.
    """

    machine_local_keys = ("path", "test", "root")
    targets = "class"
    reads: ClassVar[tuple[TargetKind, ...]] = ("class", "labels", "values")

    def __init__(
        self,
        path: str | None = None,
        test: str | dict[str, str] | None = None,
        root: str | None = None,
        image: ColumnName = "image",
        target: ColumnName | Sequence[ColumnName] | None = None,
        separator: Separator | None = None,
        kind: TableKind | None = None,
        size: Count = 224,
        crop_pct: CropShare = 1.0,
        holdout: Fraction = 0.1,
        validation: Fraction | FileName | Sets | None = 0.1,
        normalize: Normalization = "imagenet",
        max_pixels: Count = 50_000_000,
        on_error: OnError = "raise",
        max_skipped: MaxSkipped = 0.01,
        drop_last: bool = True,
        order: Sampling = "shuffled",
    ) -> None:
        self.path, self.test, self.root = (expanded(p) for p in (path, test, root))
        self.image, self.target, self.separator, self.kind = image, target, separator, kind
        self.size, self.holdout, self.validation, self.normalize = size, holdout, validation, normalize
        self.max_pixels, self.crop_pct = max_pixels, crop_pct
        self.on_error, self.max_skipped, self.drop_last, self.order = on_error, max_skipped, drop_last, order

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.path:
            yield OperatorGives("data=labels_csv needs data.path, the table that has a row for each image")
        for knob, file in (("path", self.path), ("test", self.test), ("validation", beside(self.path, self.validation))):
            if file and not Path(file).is_file():
                yield f"data.{knob}={file} is no file: set it to a table (CSV, Parquet or NumPy)"
        if self.root and not Path(self.root).is_dir():
            yield f"data.root={self.root} is no directory: set it to the folder that the images' paths begin in"
        if not self.target:
            yield "data=labels_csv needs data.target, the column that is predicted (several: data.target=[a,b])"
        if self.separator is not None and self.targets != "labels":
            yield f"data.separator={self.separator} is for several labels in a cell: set task=multilabel, or data.separator=null"

    def shape(self) -> tuple[int, ...]:
        return (3, self.size, self.size)

    def decodes_images(self) -> bool:
        return True

    def load(self, device: torch.device) -> Splits:
        path = Path(str(self.path))
        train = read_columns(path)
        column(train, self.image, "data.image", path)
        if self.test is not None:
            test = read_columns(Path(self.test))
        else:
            apart = held_out(train, self.holdout)
            train, test = rows_of(train, ~apart), rows_of(train, apart)
        if not number_of_rows(train) or not number_of_rows(test):
            raise UserError(f"{path} gives no training or no test rows: set data.test or data.holdout")
        reader = self._reader(path)
        images = self._images(train, reader.learn(train), path)
        normalize = image_normalization(self.normalize, images)
        own = beside(self.path, self.validation)
        validation = self._images(rows := read_columns(own), reader.read(rows), own) if own else None
        return Splits(
            images, self._images(test, reader.read(test), path), self.shape(), reader.outputs, normalize, reader.classes,
            units=reader.units, validation=validation,
        )  # fmt: skip

    def load_whole(self, own: Splits) -> Splits:
        path = self.other_file()
        rows, reader = read_columns(path), self._reader(path)
        every = self._images(rows, reader.read_known(rows, own), path)
        return Splits(
            every, every, self.shape(), reader.outputs, own.normalize, reader.classes, units=reader.units, origins=WHOLE
        )  # fmt: skip

    def _reader(self, path: Path) -> TargetReader:
        names = [self.target] if isinstance(self.target, str) else list(self.target or ())
        return TargetReader(self.targets or "class", names, path, "data.target", self.separator)

    def _images(self, columns: Columns, targets: torch.Tensor, table: Path) -> ImagesOfTable:
        names = column(columns, self.image, "data.image", table)
        if (empty := missing(names)).any():
            raise UserError(f"{table}: {int(empty.sum())} rows have no value in {self.image}, the image's file: remove them")
        folder = Path(self.root) if self.root else table.parent
        files = [folder / str(name) for name in names]
        if absent := [file for file in files if not file.is_file()]:
            raise UserError(f"{table} names {len(absent)} images that are not there, the first is {absent[0]}: set data.root")
        return ImagesOfTable(files, targets, self)


class ImagesOfTable(Images):
    """Images and their targets from a table as a source."""

    decodes_files = False  # a loader that decodes files itself would take rows' numbers for classes

    def __init__(self, files: Sequence[Path], targets: torch.Tensor, data: LabelsCsv) -> None:
        numbered = [(file, row) for row, file in enumerate(files)]
        super().__init__(numbered, data.size, data.max_pixels, data.on_error, data.max_skipped, data.crop_pct)
        self.targets = targets

    def labels(self) -> torch.Tensor | None:
        if self.targets.ndim > 1 or self.targets.is_floating_point():
            return None
        return self.targets[[row for _, row in self.files]]

    def fetch(self, indices: torch.Tensor, boxes: Sequence[CropBox] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        x, rows = super().fetch(indices, boxes)
        return x, self.targets[rows]

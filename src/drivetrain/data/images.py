"""Image files, a folder for each class."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from drivetrain.core.errors import DataError, OperatorGives, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, CountOrZero, RunSpec
from drivetrain.core.order import Sampling
from drivetrain.data import folders, listing
from drivetrain.data.bad_samples import MaxSkipped, OnError
from drivetrain.data.base import Data, Fraction, Normalize, Source, Splits, Validation, hash_fraction, measure_on_some
from drivetrain.data.decoding import CropShare, Decoding, ImageFileSource, check_pixels, open_image, values_of
from drivetrain.data.listing import IMAGES as IMAGES
from drivetrain.data.listing import Folder, one_form
from drivetrain.data.ranges import Range, of_values
from drivetrain.data.untrusted import ordinary, read_image_file

IMAGENET = [255 * m for m in (0.485, 0.456, 0.406)], [255 * s for s in (0.229, 0.224, 0.225)]  # mean, standard deviation
Normalization = Literal["imagenet", "measured"]
LOOKED_AT, ENLARGED, STEP = 20, 1.5, 16  # files; times the shorter side; sizes that are advised are multiples of it

logger = logging.getLogger(__name__)


def image_normalization(kind: Normalization, source: Source) -> Normalize:
    """Return ImageNet's normalisation, or the one measured on 500 of a source's images."""
    return measure_on_some(source) if kind == "measured" else Normalize(*IMAGENET)


def enlarged(root: str | None, size: int, files: Sequence[str]) -> Iterator[str]:
    """Yield what to set where most images are much smaller than the size that they are resized to; some files are looked at."""
    from PIL import Image

    sizes = []
    for path in files[:: max(1, len(files) // LOOKED_AT)]:
        with (
            contextlib.suppress(Exception),
            open(path, "rb", opener=ordinary) as file,
            Image.open(file) as image,
        ):  # a broken file is told by whoever reads it
            sizes.append((min(image.size), image.size))
    if not sizes:
        return
    side, (width, height) = sorted(sizes)[len(sizes) // 2]
    if ENLARGED * side < size:
        fitting = -(-side // STEP) * STEP
        yield (
            f"the images in {root} are {width}×{height} and are enlarged to {size}×{size}, which costs time and shows no more: "
            f"set data.size={fitting}, unless the model wants {size}"
        )


class ImageData(Data):
    """The base of options whose samples are image files."""

    size: int
    crop_pct: float = 1.0
    max_pixels: int
    on_error: OnError = "raise"
    max_skipped: float = 0.0
    normalize: Normalization
    range: Sequence[float] | None  # of the values that become 0 and 255; None: as the training files have them

    def validate(self, run: RunSpec) -> Iterator[str]:
        if self.range is not None and (len(self.range) != 2 or not self.range[0] < self.range[1]):
            yield f"data.range={list(self.range)}: give the lowest and the highest value, such as [0,4095]"

    def shape(self) -> tuple[int, ...]:
        return (3, self.size, self.size)

    def decodes_images(self) -> bool:
        return True

    def how(self) -> Decoding:
        """Return how the image files become samples."""
        return Decoding(self.size, self.max_pixels, self.crop_pct, self.on_error, self.max_skipped)

    def scaled(self, sources: Sequence[ImageFileSource], own: Splits | None = None) -> Normalize:
        """Give sources the range of their pixels: the user's, that of a run's `own` data, or that of the first source's files.

        Returns their normalisation. Raises DataError where there is no range, or all pixels are alike.
        """
        if self.range is not None:
            found: Range | None = Range(self.range[0], self.range[1], said=True)
        else:
            found = own.pixels if own is not None else measure_range(sources[0])
        for source in sources:
            source.range = found
        return own.normalize if own is not None and own.normalize is not None else image_normalization(self.normalize, sources[0])


def measure_range(source: ImageFileSource) -> Range | None:
    """Return the range of the files of more than 8 bits among some that are looked at; None where there are none.

    Raises DataError where all pixels of these files are alike.
    """
    import numpy as np

    low, high, whole, deep, plain = math.inf, -math.inf, True, 0, set[int]()
    count = min(len(source), source.looked_at)
    for index in (torch.arange(count) * len(source) // max(1, count)).tolist():
        name = source.name(index)
        try:
            with open_image(source.content(index), name) as image:
                check_pixels(image.size, name, source.how.max_pixels)
                if (values := values_of(image)) is not None:
                    deep += 1
                    low, high = float(np.minimum(low, values.min())), float(np.maximum(high, values.max()))
                    whole = whole and (values.dtype.kind != "f" or bool((values == np.rint(values)).all()))
                elif len(plain) < 2:
                    plain.update(value for ends in image.convert("RGB").getextrema() for value in ends)
        except DataError as error:  # whoever reads it says so
            logger.debug("%s", error)
    where = f"the {count} images that were looked at for their range"
    if not deep:
        if len(plain) == 1:
            raise DataError(f"all pixels of {where} have the value {min(plain)}, so there is nothing to learn: mend them")
        return None
    found = of_values(low, high, whole, where)
    logger.info(
        "%d of %s have more than 8 bits, with values from %g to %g: %g becomes black and %g white (data.range)",
        deep, where, low, high, found.low, found.high,
    )  # fmt: skip
    return found


class ImageFolder(ImageData):
    """A folder per class, or train/, val/ and test/ folders of them. Images come out as RGB, upright, `size` square.

    The test set is test/, or val/ where there is no other. Without either the share `holdout` of the files is held out,
    chosen by the hash of their names. `folders.WORDS` has the words that name a set.
    Up to `verify` files are decoded before training starts, so that a broken one is found at once.
    With on_error=skip the next readable file replaces a broken one, up to `max_skipped` times (below 1: a share of the files).
    """

    machine_local_keys = ("root",)

    def __init__(
        self,
        root: str | None = None,
        size: Count = 224,
        crop_pct: CropShare = 1.0,
        holdout: Fraction = 0.1,
        validation: Validation = "auto",
        normalize: Normalization = "imagenet",
        verify: CountOrZero = 1000,
        range: Sequence[float] | None = None,
        max_pixels: Count = 50_000_000,
        on_error: OnError = "raise",
        max_skipped: MaxSkipped = 0.01,
        drop_last: bool = True,
        order: Sampling = "shuffled",
    ) -> None:
        self.root = os.path.expanduser(root) if root else None
        self.size, self.holdout, self.validation, self.normalize = size, holdout, validation, normalize
        self.verify_files, self.max_pixels, self.range = verify, max_pixels, range
        self.drop_last, self.order = drop_last, order
        self.crop_pct, self.on_error, self.max_skipped = crop_pct, on_error, max_skipped

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not self.root:
            yield OperatorGives("data=imagefolder needs data.root, the folder that holds one folder per class")
        elif not Path(self.root).is_dir():
            yield f"data.root={self.root} is no directory: set it to the folder that holds one folder per class"
        elif isinstance(self.validation, str) and self.validation != "auto" and not (Path(self.root) / self.validation).is_dir():
            yield f"data.validation={self.validation}: {self.root} has no such folder: name one, or give a share such as 0.1"

    def load_whole(self, own: Splits) -> Splits | None:
        layout = self._layout()
        folder = layout.test or layout.train
        found = sorted(folder.folders)
        classes = found if own.names is None or not found else [one_form(name) for name in own.names]
        if unknown := sorted(set(found) - set(classes)):
            raise UserError(f"{self.root}/{folder.path} has classes that the run does not know: {', '.join(unknown[:5])}")
        if layout.test is not None and sorted(layout.train.folders) == classes:
            return None
        every = self._source(*self._files(folder, classes))
        origins = {"test": "the whole folder"} if layout.test is None else layout.origins("")
        normalize = self.scaled([every], own)
        return Splits(every, every, self.shape(), len(classes), normalize, classes, origins=origins, pixels=every.range)

    def _layout(self) -> folders.Layout:
        root = str(self.root)
        listed = listing.walk(root, IMAGES)
        layout = folders.find(root, listed, self.validation if isinstance(self.validation, str) else None)
        self._log_not_read(listed, layout)
        return layout

    def _log_not_read(self, listed: Folder, layout: folders.Layout) -> None:
        """Log the folders and files that are not read."""
        beside = Counter(f"{os.path.splitext(name)[1]} beside the class folders" for name in folders.strays(listed, layout.train))
        said = [
            ", ".join(f"{name}/" for name in layout.not_read if name not in self.beside),
            listing.said(listed.passed_over),
            listing.said(beside),
        ]
        if any(said):
            logger.warning("%s has folders and files that are not read: %s", self.root, ", ".join(filter(None, said)))
        if listed.twins:
            logger.warning(
                "%s has %d images of one name and two kinds, which may be the same picture twice: the first is %s", self.root,
                len(listed.twins), listed.twins[0],
            )  # fmt: skip

    def _source(self, paths: Sequence[str], targets: Sequence[int]) -> Images:
        return Images(str(self.root), paths, torch.tensor(targets), self.how())

    def load(self, device: torch.device) -> Splits:
        layout = self._layout()
        classes, folder = sorted(layout.train.folders), len(layout.train.path)
        if len(classes) < 2 and self.targets == "class":
            raise UserError(
                f"{self.root}/{layout.train.path} has {f'one class folder, {classes[0]}/' if classes else 'no class folders'}: "
                "data.root must hold one folder of images for each of two or more classes"
            )
        train, labels = self._files(layout.train, classes)
        every = self._source(train, labels)
        if layout.test is None:
            apart = torch.tensor([hash_fraction(path[folder:]) < self.holdout for path in train], dtype=torch.bool)
            sources = [every.subset((apart == held).nonzero().flatten()) for held in (False, True)]
        else:
            sources = [every, self._source(*self._files(layout.test, classes, layout.train))]
        if not len(sources[0]) or not len(sources[1]):
            raise UserError(
                f"{self.root} gives {len(sources[0])} training and {len(sources[1])} test images: "
                "add images, a test/ folder, or raise data.holdout"
            )
        if layout.validation is not None:
            sources.append(self._source(*self._files(layout.validation, classes, layout.train)))
        normalize = self.scaled(sources)
        left = self.verify_files
        for source in sources:
            for index in range(min(left, len(source))):
                source.sample(index)
            left -= min(left, len(source))
        for line in enlarged(self.root, self.size, list(map(sources[0].name, range(len(sources[0]))))):
            logger.info("%s", line)
        validation = sources[2] if len(sources) > 2 else None
        return Splits(
            sources[0], sources[1], self.shape(), len(classes), normalize, classes, validation=validation,
            origins=layout.origins(f"{self.holdout:g} of the files"), pixels=sources[0].range,
        )  # fmt: skip

    def _files(self, folder: Folder, classes: list[str], train: Folder | None = None) -> tuple[list[str], list[int]]:
        """Return the files of each class, and their classes. A folder beside that of training may have no others: UserError."""
        if train is not None and (unknown := set(folder.folders) - set(classes)):
            raise UserError(f"{self.root}/{folder.path} has classes that {train.path} has not: {', '.join(sorted(unknown))}")
        if empty := [inside.path for inside in folder.folders.values() if not inside.holds_files()]:
            where = ", ".join(f"{self.root}/{path}" for path in empty)
            raise UserError(f"no image in {where}: remove the empty class or add images ({' '.join(IMAGES)})")
        paths: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            if name in folder.folders:
                paths += folder.folders[name].every()
                labels += [label] * (len(paths) - len(labels))
        return paths, labels


class Images(ImageFileSource):
    """Image files as a source: `paths` from the folder `root`."""

    def __init__(self, root: str, paths: Sequence[str], targets: torch.Tensor, how: Decoding) -> None:
        self.root, self.paths = root, paths
        super().__init__(how, targets)

    def content(self, index: int) -> bytes:
        return read_image_file(self.name(index), self.how.max_pixels)

    def name(self, index: int) -> str:
        return os.path.join(self.root, self.paths[index])

    def select(self, indices: torch.Tensor) -> None:
        super().select(indices)
        self.paths = [self.paths[i] for i in indices.tolist()]

    def identities(self) -> list[str]:
        """Return the files' paths below the folder that all are in, which are the same on every machine."""
        if not self.paths:
            return []
        folder = len(os.path.commonpath([min(self.paths), max(self.paths)]))
        return [path[folder:] for path in self.paths]

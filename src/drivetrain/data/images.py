"""Image files, a folder for each class."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from drivetrain.core.errors import OperatorGives, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, CountOrZero, RunSpec
from drivetrain.core.order import Sampling
from drivetrain.data import folders
from drivetrain.data.bad_samples import MaxSkipped, OnError, bad_sample_policy
from drivetrain.data.base import Data, Fraction, Normalize, Source, Splits, Validation, hash_fraction, measure_on_some
from drivetrain.data.decoding import CropShare, ImageFileSource
from drivetrain.data.folders import IMAGES as IMAGES
from drivetrain.data.untrusted import ordinary, read_image_file

IMAGENET = [255 * m for m in (0.485, 0.456, 0.406)], [255 * s for s in (0.229, 0.224, 0.225)]  # mean, standard deviation
Normalization = Literal["imagenet", "measured"]
File = tuple[Path, int]  # and its class
LOOKED_AT, ENLARGED, STEP = 20, 1.5, 16  # files; times the shorter side; sizes that are advised are multiples of it

logger = logging.getLogger(__name__)


def image_normalization(kind: Normalization, source: Source) -> Normalize:
    """Return ImageNet's normalisation, or the one measured on 500 of a source's images."""
    return measure_on_some(source) if kind == "measured" else Normalize(*IMAGENET)


def enlarged(root: str | None, size: int, files: Sequence[Path]) -> Iterator[str]:
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


class ImageFolder(Data):
    """A folder per class, or train/, val/ and test/ folders of them. Images come out as RGB, upright, `size` square.

    The test set is test/, or val/ where there is no other. Without either the share `holdout` of the files is held out,
    chosen by the hash of their names. `folders.NAMES` has the names that these folders may have, in any case.
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
        max_pixels: Count = 50_000_000,
        on_error: OnError = "raise",
        max_skipped: MaxSkipped = 0.01,
        drop_last: bool = True,
        order: Sampling = "shuffled",
    ) -> None:
        self.root = os.path.expanduser(root) if root else None
        self.size, self.holdout, self.validation, self.normalize = size, holdout, validation, normalize
        self.verify_files, self.max_pixels, self.drop_last, self.order = verify, max_pixels, drop_last, order
        self.crop_pct, self.on_error, self.max_skipped = crop_pct, on_error, max_skipped

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.root:
            yield OperatorGives("data=imagefolder needs data.root, the folder that holds one folder per class")
        elif not Path(self.root).is_dir():
            yield f"data.root={self.root} is no directory: set it to the folder that holds one folder per class"
        elif isinstance(self.validation, str) and self.validation != "auto" and not (Path(self.root) / self.validation).is_dir():
            yield f"data.validation={self.validation}: {self.root} has no such folder: name one, or give a share such as 0.1"

    def shape(self) -> tuple[int, ...]:
        return (3, self.size, self.size)

    def decodes_images(self) -> bool:
        return True

    def load_whole(self, own: Splits) -> Splits | None:
        layout = self._layout()
        folder = layout.test or layout.train
        found = folders.class_folders(folder)
        classes = found if own.names is None or not found else list(own.names)
        if unknown := sorted(set(found) - set(classes)):
            raise UserError(f"{folder} has classes that the run does not know: {', '.join(unknown[:5])}")
        if layout.test is not None and folders.class_folders(layout.train) == classes:
            return None
        every = Images(self._list(folder, classes), self.size, self.max_pixels, self.on_error, self.max_skipped, self.crop_pct)
        origins = {"test": "the whole folder"} if layout.test is None else layout.origins("")
        return Splits(every, every, self.shape(), len(classes), own.normalize, classes, origins=origins)

    def _layout(self) -> folders.Layout:
        return folders.find(Path(str(self.root)), self.validation if isinstance(self.validation, str) else None)

    def load(self, device: torch.device) -> Splits:
        layout = self._layout()
        if layout.not_read:
            logger.warning("%s has folders that are not read: %s", self.root, ", ".join(layout.not_read))
        sets, classes = self._files(layout)
        sources = [Images(f, self.size, self.max_pixels, self.on_error, self.max_skipped, self.crop_pct) for f in sets]
        left = self.verify_files
        for source in sources:
            for index in range(min(left, len(source))):
                source.sample(index)
            left -= min(left, len(source))
        for line in enlarged(self.root, self.size, [path for path, _ in sets[0]]):
            logger.info("%s", line)
        normalize = image_normalization(self.normalize, sources[0])
        validation = sources[2] if len(sources) > 2 else None
        return Splits(
            sources[0], sources[1], self.shape(), len(classes), normalize, classes, validation=validation,
            origins=layout.origins(f"{self.holdout:g} of the files"),
        )  # fmt: skip

    def _files(self, layout: folders.Layout) -> tuple[list[list[File]], list[str]]:
        """Return the files of training, test and, where it has a folder, validation; and the classes' names. Raises UserError."""
        classes = folders.class_folders(layout.train)
        train, test = self._list(layout.train, classes), []
        if layout.test is not None:
            test = self._list(layout.test, classes, layout.train)
        else:
            held_out = {path for path, _ in train if hash_fraction(path.relative_to(layout.train).as_posix()) < self.holdout}
            test = [file for file in train if file[0] in held_out]
            train = [file for file in train if file[0] not in held_out]
        if not train or not test:
            raise UserError(
                f"{self.root} gives {len(train)} training and {len(test)} test images: "
                "add images, a test/ folder, or raise data.holdout"
            )
        own = [self._list(layout.validation, classes, layout.train)] if layout.validation is not None else []
        return [train, test, *own], classes

    def _list(self, folder: Path, classes: list[str], train: Path | None = None) -> list[File]:
        """Return the files of each class. A folder beside that of the training may have no other classes. Raises UserError."""
        if train is not None and (unknown := set(folders.class_folders(folder)) - set(classes)):
            raise UserError(f"{folder} has classes that {train} has not: {', '.join(sorted(unknown))}")
        if not classes:
            raise UserError(f"{folder} holds no class folders: data.root must hold one folder of images per class")
        files, empty = [], []
        for label, name in enumerate(classes):
            paths = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in IMAGES)
            files += [(p, label) for p in paths]
            if not paths and (folder / name).is_dir():
                empty.append(str(folder / name))
        if empty:
            raise UserError(f"no image in {', '.join(empty)}: remove the empty class or add images ({' '.join(IMAGES)})")
        return files


class Images(ImageFileSource):
    """Image files as a source."""

    def __init__(
        self,
        files: list[File],
        size: int,
        max_pixels: int,
        on_error: OnError = "raise",
        max_skipped: MaxSkipped = 0.0,
        crop_pct: float = 1.0,
    ) -> None:
        self.files, self.size, self.max_pixels, self.crop_pct = files, size, max_pixels, crop_pct
        self.policy = bad_sample_policy(on_error, max_skipped, len(files), self.name)

    def __len__(self) -> int:
        return len(self.files)

    def content(self, index: int) -> tuple[bytes, int]:
        path, label = self.files[index]
        return read_image_file(path, self.max_pixels), label

    def name(self, index: int) -> str:
        return str(self.files[index][0])

    def select(self, indices: torch.Tensor) -> None:
        self.files = [self.files[i] for i in indices.tolist()]

    def labels(self) -> torch.Tensor | None:
        """Return the classes (n,), where there is one for each image."""
        return torch.tensor([label for _, label in self.files])

    def identities(self) -> list[str]:
        """Return the files' paths below the folder that all are in, which are the same on every machine."""
        paths = [str(path) for path, _ in self.files]
        folder = os.path.commonpath([min(paths), max(paths)])
        return [path[len(folder) :] for path in paths]

"""Image files, a folder for each class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, CountOrZero, RunSpec
from drivetrain.data.bad_samples import MaxSkipped, OnError, bad_sample_policy
from drivetrain.data.base import Data, Fraction, Normalize, Source, Splits, hash_fraction, measure_on_some
from drivetrain.data.decoding import DAMAGED, ImageFileSource

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")
IMAGENET = [255 * m for m in (0.485, 0.456, 0.406)], [255 * s for s in (0.229, 0.224, 0.225)]  # mean, standard deviation
Normalization = Literal["imagenet", "measured"]
File = tuple[Path, int]  # and its class


def image_normalization(kind: Normalization, source: Source) -> Normalize:
    """Return ImageNet's normalisation, or the one measured on 500 of a source's images."""
    return measure_on_some(source) if kind == "measured" else Normalize(*IMAGENET)


class ImageFolder(Data):
    """A folder per class, or train/ and val/ (test/) folders of them. Images come out as RGB, upright, `size` square.

    Without a validation folder, the share `holdout` of the files is held out, chosen by the hash of their names.
    Up to `verify` files are decoded before training starts, so that a broken one is found at once.
    With on_error=skip the next readable file replaces a broken one, up to `max_skipped` times (below 1: a share of the files).
    """

    machine_local_keys = ("root",)

    def __init__(
        self,
        root: str | None = None,
        size: Count = 224,
        holdout: Fraction = 0.1,
        normalize: Normalization = "imagenet",
        verify: CountOrZero = 1000,
        max_pixels: Count = 100_000_000,
        on_error: OnError = "raise",
        max_skipped: MaxSkipped = 0.01,
        drop_last: bool = True,
    ) -> None:
        self.root = os.path.expanduser(root) if root else None
        self.size, self.holdout, self.normalize = size, holdout, normalize
        self.verify_files, self.max_pixels, self.drop_last = verify, max_pixels, drop_last
        self.on_error, self.max_skipped = on_error, max_skipped

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.root:
            yield "data=imagefolder needs data.root, the folder that holds one folder per class"
        elif not Path(self.root).is_dir():
            yield f"data.root={self.root} is no directory: set it to the folder that holds one folder per class"

    def shape(self) -> tuple[int, ...]:
        return (3, self.size, self.size)

    def decodes_images(self) -> bool:
        return True

    def load(self, device: torch.device) -> Splits:
        train, test, classes = self._files(Path(str(self.root)))
        sources = [Images(f, self.size, self.max_pixels, self.on_error, self.max_skipped) for f in (train, test)]
        left = self.verify_files
        for source in sources:
            for index in range(min(left, len(source))):
                source.sample(index)
            left -= min(left, len(source))
        normalize = image_normalization(self.normalize, sources[0])
        return Splits(sources[0], sources[1], self.shape(), len(classes), normalize, classes)

    def _files(self, root: Path) -> tuple[list[File], list[File], list[str]]:
        """Return the training files, the test files and the classes' names. Raises UserError."""
        folders = {name: root / name for name in ("train", "val", "valid", "test") if (root / name).is_dir()}
        train_dir = folders.get("train", root)
        test_dir = next((folders[n] for n in ("val", "valid", "test") if n in folders), None) if "train" in folders else None
        classes = _class_folders(train_dir)
        train = self._list(train_dir, classes)
        if test_dir is not None:
            unknown = set(_class_folders(test_dir)) - set(classes)
            if unknown:
                raise UserError(f"{test_dir} has classes that {train_dir} has not: {', '.join(sorted(unknown))}")
            test = self._list(test_dir, classes)
        else:
            held_out = {path for path, _ in train if hash_fraction(path.relative_to(train_dir).as_posix()) < self.holdout}
            test = [file for file in train if file[0] in held_out]
            train = [file for file in train if file[0] not in held_out]
        if not train or not test:
            raise UserError(
                f"{root} gives {len(train)} training and {len(test)} test images: "
                "add images, a val/ folder, or raise data.holdout"
            )
        return train, test, classes

    def _list(self, folder: Path, classes: list[str]) -> list[File]:
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


def _class_folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")


class Images(ImageFileSource):
    """Image files as a source."""

    def __init__(
        self, files: list[File], size: int, max_pixels: int, on_error: OnError = "raise", max_skipped: MaxSkipped = 0.0
    ) -> None:
        self.files, self.size, self.max_pixels = files, size, max_pixels
        self.policy = bad_sample_policy(on_error, max_skipped, len(files), self.name)

    def __len__(self) -> int:
        return len(self.files)

    def content(self, index: int) -> tuple[bytes, int]:
        path, label = self.files[index]
        try:
            return path.read_bytes(), label
        except OSError as error:
            raise DataError(f"{path} {DAMAGED.format(error.strerror)}") from None

    def name(self, index: int) -> str:
        return str(self.files[index][0])

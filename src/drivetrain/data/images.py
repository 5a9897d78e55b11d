"""Image files, a folder for each class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, CountOrZero, RunSpec
from drivetrain.data import bad_samples
from drivetrain.data.bad_samples import MaxSkipped, OnError
from drivetrain.data.base import Data, Fraction, Normalize, Splits, measured
from drivetrain.data.decoding import DAMAGED, Decoding

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")
IMAGENET = [255 * m for m in (0.485, 0.456, 0.406)], [255 * s for s in (0.229, 0.224, 0.225)]  # mean, deviation


class ImageFolder(Data):
    """A folder per class, or train/ and val/ (test/) folders of them. Images come out as RGB, right side up, `size` square.

    Without a validation folder, `holdout` of the files are held out, chosen by their names' hash.
    Up to `verify` files are decoded before training starts; beyond that a broken one is named when it is reached.
    With on_error=skip the next file that reads stands for a broken one; `max_skipped` is how many may be (below 1: which share).
    """

    machine_local_keys = ("root",)

    def __init__(
        self,
        root: str | None = None,
        size: Count = 224,
        holdout: Fraction = 0.1,
        normalize: Literal["imagenet", "measured"] = "imagenet",
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

    def decodes(self) -> bool:
        return True

    def load(self, device: torch.device) -> Splits:
        root = Path(str(self.root))
        named = {name: root / name for name in ("train", "val", "valid", "test") if (root / name).is_dir()}
        train_dir = named.get("train", root)
        held_dir = next((named[n] for n in ("val", "valid", "test") if n in named), None) if "train" in named else None
        classes = sorted(entry.name for entry in os.scandir(train_dir) if entry.is_dir() and entry.name[0] != ".")
        train = self._list(train_dir, classes)
        if held_dir is not None:
            unknown = {e.name for e in os.scandir(held_dir) if e.is_dir() and e.name[0] != "."} - set(classes)
            if unknown:
                raise UserError(f"{held_dir} has classes that {train_dir} has not: {', '.join(sorted(unknown))}")
            test = self._list(held_dir, classes)
        else:
            test = [f for f in train if self._held_out(f[0].relative_to(train_dir))]
            train = [f for f in train if not self._held_out(f[0].relative_to(train_dir))]
        if not train or not test:
            raise UserError(
                f"{root} gives {len(train)} training and {len(test)} test images: "
                "add images, a val/ folder, or raise data.holdout"
            )
        sources = [Images(f, self.size, self.max_pixels, self.on_error, self.max_skipped) for f in (train, test)]
        left = self.verify_files
        for source in sources:
            for index in range(min(left, len(source))):
                source.sample(index)
            left -= min(left, len(source))
        return Splits(sources[0], sources[1], self.shape(), len(classes), self._normalize(sources[0]), classes)

    def _list(self, folder: Path, classes: list[str]) -> list[tuple[Path, int]]:
        if not classes:
            raise UserError(f"{folder} holds no class folders: data.root wants one folder of images per class")
        files, empty = [], []
        for label, name in enumerate(classes):
            paths = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in IMAGES)
            files += [(p, label) for p in paths]
            if not paths and (folder / name).is_dir():
                empty.append(str(folder / name))
        if empty:
            raise UserError(f"no image in {', '.join(empty)}: remove the empty class or add images ({' '.join(IMAGES)})")
        return files

    def _held_out(self, path: Path) -> bool:
        import hashlib

        word = int.from_bytes(hashlib.sha256(path.as_posix().encode()).digest()[:8], "big")
        return word / 2**64 < self.holdout

    def _normalize(self, source: Images) -> Normalize:
        if self.normalize == "measured":
            sample = torch.arange(min(len(source), 500)) * (len(source) // min(len(source), 500))
            return measured(source.fetch(sample)[0])
        return Normalize(*IMAGENET)


class Images(Decoding):
    """Image files as a source."""

    def __init__(
        self,
        files: list[tuple[Path, int]],
        size: int,
        max_pixels: int,
        on_error: OnError = "raise",
        max_skipped: MaxSkipped = 0.0,
    ) -> None:
        self.files, self.size, self.max_pixels = files, size, max_pixels
        self.faults = bad_samples.policy(on_error, max_skipped, len(files), self.name)

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

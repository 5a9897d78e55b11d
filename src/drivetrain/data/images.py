"""Image files, a folder for each class."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from drivetrain.data import faults
from drivetrain.data.base import Data, Fraction, Normalize, Splits, measured
from drivetrain.data.faults import Faults, MaxSkipped, OnError
from drivetrain.errors import DataError, UserError
from drivetrain.lazy import torch
from drivetrain.spec import Count, CountOrZero, Run

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")
IMAGENET = [255 * m for m in (0.485, 0.456, 0.406)], [255 * s for s in (0.229, 0.224, 0.225)]  # mean, deviation


class ImageFolder(Data):
    """A folder per class, or train/ and val/ (test/) folders of them. Images come out as RGB, right side up, `size` square.

    Without a validation folder, `holdout` of the files are held out, chosen by their names' hash.
    Up to `verify` files are decoded before training starts; beyond that a broken one is named when it is reached.
    With on_error=skip the next file that reads stands for a broken one; `max_skipped` is how many may be (below 1: which share).
    """

    operators = ("root",)

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

    def check(self, run: Run) -> Iterator[str]:
        if not self.root:
            yield "data=imagefolder needs data.root, the folder that holds one folder per class"
        elif not Path(self.root).is_dir():
            yield f"data.root={self.root} is no directory: set it to the folder that holds one folder per class"

    def shape(self) -> tuple[int, ...]:
        return (3, self.size, self.size)

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


class Decoding:
    """A source that decodes an image file for each sample: uint8 (n, 3, size, size). What is its own is `decoded`."""

    parallel_read = True  # decoding is work
    crops = True  # it takes boxes: crops at decoding
    faults: Faults

    def decoded(self, index: int, box: Any = None) -> tuple[torch.Tensor, int]:
        """Sample `index`, uint8 (3, size, size), and its label. Raises DataError naming it."""
        raise NotImplementedError

    def fetch(self, indices: torch.Tensor, boxes: Sequence[Any] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The images, or what `boxes` cuts out of each, and their labels."""
        cut = [None] * len(indices) if boxes is None else boxes
        x, y = zip(*self.samples(indices.tolist(), cut), strict=True)
        return torch.stack(x), torch.tensor(y)

    def samples(self, indices: list[int], boxes: Sequence[Any]) -> Iterable[tuple[torch.Tensor, int]]:
        """Each sample, in order."""
        return map(self.sample, indices, boxes)

    def sample(self, index: int, box: Any = None) -> tuple[torch.Tensor, int]:
        """One sample, or what stands for it: uint8 (3, size, size) and its label."""
        return self.faults.read(index, lambda found: self.decoded(found, box))

    def readable(self, index: int) -> int:
        """The sample itself, or which one stands for it."""
        return self.faults.read(index, lambda found: (self.decoded(found), found)[1])

    def skipped(self) -> list[str]:
        """The names of the samples that others stood for."""
        return self.faults.skipped()


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
        self.faults = faults.policy(on_error, max_skipped, len(files), self.name)

    def __len__(self) -> int:
        return len(self.files)

    def decoded(self, index: int, box: Any = None) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        return decode(path, self.size, self.max_pixels, box), label

    def encoded(self, index: int) -> tuple[bytes, int]:
        """The file as it is, of one that can be decoded, and its label."""
        path, label = self.files[self.readable(index)]
        return path.read_bytes(), label

    def name(self, index: int) -> str:
        """The file of a sample."""
        return str(self.files[index][0])


class Member(io.BytesIO):
    """An image that lies in a larger file, under the name by which messages call it."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.called = name

    def __str__(self) -> str:
        return self.called


def decode(path: Path | Member, size: int, max_pixels: int, box: Any = None) -> torch.Tensor:
    """An image file as uint8 (3, size, size): shorter side resized, centre cropped, or what `box` (augment.Box) cuts out.

    Raises DataError naming the file.
    """
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            if image.width * image.height > max_pixels:
                raise DataError(f"{path} has {image.width}×{image.height} pixels, over data.max_pixels={max_pixels}")
            turned = image.getexif().get(0x0112, 1) >= 5  # on its side
            full = (image.height, image.width) if turned else image.size
            cut = None if box is None else box(*full)
            enough = (size, size) if cut is None else [math.ceil(size * f / c) for f, c in zip(full, cut[2:], strict=True)]
            # JPEG: decode at a half, quarter or eighth where that is enough
            image.draft("RGB", (enough[1], enough[0]) if turned else (enough[0], enough[1]))
            upright: Any = ImageOps.exif_transpose(image)
            rgb = in_rgb(upright)
            if cut is None:
                rgb = ImageOps.fit(rgb, (size, size), Image.Resampling.BILINEAR)
            else:
                x, y = rgb.width / full[0], rgb.height / full[1]  # of the draft
                left, top, width, height = cut
                area = (left * x, top * y, (left + width) * x, (top + height) * y)
                rgb = rgb.resize((size, size), Image.Resampling[box.interpolation.upper()], area)
    except DataError:
        raise
    except Exception as error:  # a damaged file can make an image library fail in any way
        raise DataError(f"{path} cannot be read as an image ({error}): mend or remove it") from None
    return torch.from_numpy(np.asarray(rgb).copy()).permute(2, 0, 1)


def in_rgb(image: Any) -> Any:
    """Any kind of image in RGB. Sixteen bits are scaled to eight: PIL's conversion would cut them off at 255."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    return image.convert("RGB")

"""What is trained on: a training and a test source, read a batch at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import annotated_types

from drivetrain import rng
from drivetrain.errors import DataError, UserError
from drivetrain.lazy import torch
from drivetrain.spec import Count, CountOrZero, Part, Run

Fraction = Annotated[float, annotated_types.Gt(0), annotated_types.Lt(1)]
DIGITS = 1797
IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")


class Source(Protocol):
    """Samples that can be read by index, a batch at once."""

    def __len__(self) -> int: ...

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (n, …) and targets (n,) of the samples `indices` (n,)."""
        ...


@dataclass
class Splits:
    """A data option, read: both sources, and what a model must know of them."""

    train: Source
    test: Source
    shape: tuple[int, ...]  # of one input
    classes: int
    normalize: Normalize | None


class Normalize:
    """uint8 or float inputs to (x − mean) / std per channel, in float32."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() - self.mean).div_(self.std)  # float() of a float is no copy: the source keeps its values


class Tensors:
    """A source held in memory."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.x.is_cuda:  # the copy of the indices must not wait for the device
            indices = indices.pin_memory().to(self.x.device, non_blocking=True)
        return self.x.index_select(0, indices), self.y.index_select(0, indices)


class Data(Part):
    """The base of every data option."""

    drop_last: bool

    def load(self, device: torch.device) -> Splits:
        """Read what training needs. Raises UserError where the data is not there or not usable."""
        raise NotImplementedError

    def shape(self) -> tuple[int, ...] | None:
        """The shape of one input, where it is known before reading."""
        return None

    def train_samples(self) -> int | None:
        """How many samples an epoch has, where it is known before reading."""
        return None


class Digits(Data):
    """scikit-learn's 1,797 real handwritten digits, 8×8 (Alpaydin & Kaynak 1998): on every machine, nothing to download."""

    def __init__(self, holdout: Fraction = 0.2, normalize: bool = True, drop_last: bool = True) -> None:
        self.holdout, self.normalize, self.drop_last = holdout, normalize, drop_last

    def shape(self) -> tuple[int, ...]:
        return (1, 8, 8)

    def train_samples(self) -> int:
        return DIGITS - round(DIGITS * self.holdout)

    def load(self, device: torch.device) -> Splits:
        x, y = _read_digits()
        order = rng.permutation(0, 0, len(y))  # one split for ever, whatever the run's seed
        test, train = order.split([round(len(y) * self.holdout), len(y) - round(len(y) * self.holdout)])
        sources = Tensors(x[train], y[train]), Tensors(x[test], y[test])
        normalize = _measured(sources[0].x) if self.normalize else Normalize([0.0], [1.0])
        return Splits(*sources, self.shape(), 10, normalize)


def _read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (n, 1, 8, 8) uint8 in 0 … 16 and labels (n,)."""
    from importlib.util import find_spec

    import numpy as np

    spec = find_spec("sklearn")  # its file alone: importing the package takes a second
    root = Path(next(iter(spec.submodule_search_locations or [""]))) if spec else Path()
    file = root / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    else:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        table = np.column_stack([images, labels]).astype(np.float32)
    x = torch.from_numpy(table[:, :-1]).to(torch.uint8).view(-1, 1, 8, 8)
    return x, torch.from_numpy(table[:, -1]).long()


def _measured(x: torch.Tensor) -> Normalize:
    """Mean 0 and standard deviation 1 per channel on the training set, measured."""
    per_channel = x.double().transpose(0, 1).flatten(1)
    return Normalize(per_channel.mean(1).tolist(), per_channel.std(1).tolist())


class Synthetic(Data):
    """Random inputs on the device: the speed of everything but the data."""

    def __init__(
        self,
        shape: Sequence[Count] = (3, 32, 32),
        classes: Count = 10,
        samples: Count = 2048,
        test_samples: Count = 256,
        drop_last: bool = True,
    ) -> None:
        self._shape, self.classes, self.drop_last = tuple(shape), classes, drop_last
        self.samples, self.test_samples = samples, test_samples

    def shape(self) -> tuple[int, ...]:
        return self._shape

    def train_samples(self) -> int:
        return self.samples

    def load(self, device: torch.device) -> Splits:
        generator = torch.Generator(device).manual_seed(rng.mix(0, 5))

        def make(n: int) -> Tensors:
            x = torch.randn(n, *self._shape, generator=generator, device=device)
            return Tensors(x, torch.randint(self.classes, (n,), generator=generator, device=device))

        return Splits(make(self.samples), make(self.test_samples), self._shape, self.classes, None)


class ImageFolder(Data):
    """A folder per class, or train/ and val/ (test/) folders of them. Images come out as RGB, right side up, `size` square.

    Without a validation folder, `holdout` of the files are held out, chosen by their names' hash.
    Up to `verify` files are decoded before training starts; beyond that a broken one is named when it is reached.
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
        drop_last: bool = True,
    ) -> None:
        self.root = os.path.expanduser(root) if root else None
        self.size, self.holdout, self.normalize = size, holdout, normalize
        self.verify_files, self.max_pixels, self.drop_last = verify, max_pixels, drop_last

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
        sources = tuple(Images(files, self.size, self.max_pixels) for files in (train, test))
        for path, _ in (train + test)[: self.verify_files]:
            decode(path, self.size, self.max_pixels)
        return Splits(sources[0], sources[1], self.shape(), len(classes), self._normalize(sources[0]))

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
            return _measured(source.fetch(sample)[0])
        return Normalize([255 * m for m in (0.485, 0.456, 0.406)], [255 * s for s in (0.229, 0.224, 0.225)])


class Images:
    """Image files as a source: uint8 (n, 3, size, size)."""

    def __init__(self, files: list[tuple[Path, int]], size: int, max_pixels: int) -> None:
        self.files, self.size, self.max_pixels = files, size, max_pixels

    def __len__(self) -> int:
        return len(self.files)

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = [self.files[i] for i in indices.tolist()]
        x = torch.stack([decode(path, self.size, self.max_pixels) for path, _ in chosen])
        return x, torch.tensor([label for _, label in chosen])


def decode(path: Path, size: int, max_pixels: int) -> torch.Tensor:
    """An image file as uint8 (3, size, size): shorter side resized, centre cropped. Raises DataError naming the file."""
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            if image.width * image.height > max_pixels:
                raise DataError(f"{path} has {image.width}×{image.height} pixels, over data.max_pixels={max_pixels}")
            image.draft("RGB", (size, size))  # JPEG: decode at a half, quarter or eighth where that is enough
            upright: Any = ImageOps.exif_transpose(image)
            rgb = ImageOps.fit(upright.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read as an image ({error}): mend or remove it") from None
    return torch.from_numpy(np.asarray(rgb).copy()).permute(2, 0, 1)

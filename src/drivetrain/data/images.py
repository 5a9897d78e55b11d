"""Image files: a folder for each class, or a table with a row for each."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from drivetrain.core.allowed import ColumnName, FileName, one_of
from drivetrain.core.errors import DataError, OperatorGives, UserError
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, CountOrZero, RunSpec
from drivetrain.core.order import Sampling
from drivetrain.core.targets import TargetKind
from drivetrain.data import listing
from drivetrain.data.base import (
    WHOLE,
    Data,
    FileSets,
    Fraction,
    Normalize,
    Sets,
    Splits,
    Validation,
    beside,
    expanded,
    hash_fraction,
    measure_on_some,
)
from drivetrain.data.decoding import (
    CropShare,
    Decoding,
    ImageFileSource,
    MaxSkipped,
    OnError,
    Range,
    check_pixels,
    of_values,
    open_image,
    values_of,
)
from drivetrain.data.listing import IMAGES as IMAGES
from drivetrain.data.listing import Folder, one_form
from drivetrain.data.schema import Schema, TargetReader, check_names, columns_of, words_of
from drivetrain.data.tables import KINDS, Cells, absent, open_table
from drivetrain.data.tabular import KEPT, Delimiter, form_of, names_of
from drivetrain.data.untrusted import Encoding, as_kept, read_image_file

IMAGENET = [255 * m for m in (0.485, 0.456, 0.406)], [255 * s for s in (0.229, 0.224, 0.225)]  # mean, standard deviation
Normalization = Literal["imagenet", "measured"]
ENLARGED, STEP = 1.5, 16  # times the shorter side; sizes that are advised are multiples of it

logger = logging.getLogger(__name__)


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

    def looked_at(
        self, sources: Sequence[ImageFileSource], own: Splits | None = None, *more: str, doubts: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Give sources the range of their pixels: the user's, that of a run's `own` data, or that of the first source's files.

        Returns what Splits say of them: their normalisation, their range, what they are in short, with `more` of it, and what
        looks wrong. Raises DataError where there is no range, or all pixels are alike.
        """
        seen = Seen.of(sources[0])
        if self.range is not None:
            found: Range | None = Range(self.range[0], self.range[1], said=True)
        else:
            found = own.pixels if own is not None else seen.range()
        for source in sources:
            source.range = found
        normalize = own.normalize if own is not None else None
        if normalize is None:
            normalize = measure_on_some(sources[0]) if self.normalize == "measured" else Normalize(*IMAGENET)
        return {
            "normalize": normalize,
            "pixels": found,
            "inputs": "; ".join(filter(None, [f"inputs: {seen.described()}, as {self.size}×{self.size}", *more])),
            "doubts": [*doubts, *seen.enlarged(self.size)],
        }


@dataclass
class Seen:
    """What was seen of some files of a source, spread evenly."""

    files: int
    sizes: list[tuple[int, int]] = field(default_factory=list)  # width and height of those that can be read
    deep: int = 0  # files of more than 8 bits; of their values:
    low: float = math.inf
    high: float = -math.inf
    whole: bool = True  # numbers, all of them
    plain: set[int] = field(default_factory=set)  # the first different values of files of 8 bits

    @classmethod
    def of(cls, source: ImageFileSource) -> Self:
        """Look at some files of a source."""
        seen = cls(min(len(source), source.looked_at))
        for index in (torch.arange(seen.files) * len(source) // max(1, seen.files)).tolist():
            name = source.name(index)
            try:
                with open_image(source.content(index), name) as image:
                    check_pixels(image.size, name, source.how.max_pixels)
                    seen.sizes.append(image.size)
                    if (values := values_of(image)) is not None:
                        seen.deep += 1
                        seen.low = float(np.minimum(seen.low, values.min()))  # which NaN passes
                        seen.high = float(np.maximum(seen.high, values.max()))
                        seen.whole = seen.whole and (values.dtype.kind != "f" or bool((values == np.rint(values)).all()))
                    elif len(seen.plain) < 2:
                        seen.plain.update(value for ends in image.convert("RGB").getextrema() for value in ends)
            except DataError as error:  # whoever reads it says so
                logger.debug("%s", error)
        return seen

    def range(self) -> Range | None:
        """Return the range of files of more than 8 bits; None where there are none. Raises DataError if all pixels are alike."""
        where = f"the {self.files} images that were looked at for their range"
        if not self.deep and len(self.plain) == 1:
            raise DataError(f"all pixels of {where} have the value {min(self.plain)}, so there is nothing to learn: mend them")
        return of_values(self.low, self.high, self.whole, where) if self.deep else None

    def described(self) -> str:
        """Return the sizes of the images in words, and their values where they have more than 8 bits."""
        if not self.sizes:
            return "images"
        ends = [min(self.sizes, key=math.prod), max(self.sizes, key=math.prod)]
        sizes = " to ".join(dict.fromkeys(f"{width}×{height}" for width, height in ends))
        if not self.deep or not math.isfinite(self.low + self.high):
            return f"images of {sizes}"
        found = of_values(self.low, self.high, self.whole, "")
        share = "" if self.deep == self.files else f" in {self.deep} of {self.files} files"
        return (
            f"images of {sizes} with values {self.low:g} to {self.high:g}{share}, of which {found.low:g} becomes black and "
            f"{found.high:g} white (data.range)"
        )

    def enlarged(self, size: int) -> Iterator[str]:
        """Yield what to set where most images are much smaller than the size that they are resized to."""
        if not self.sizes:
            return
        side, (width, height) = sorted((min(each), each) for each in self.sizes)[len(self.sizes) // 2]
        if ENLARGED * side < size > (fitting := -(-side // STEP) * STEP):
            yield (
                f"the images are {width}×{height} and are enlarged to {size}×{size}, which costs time and shows no more: set "
                f"data.size={fitting}, unless the model wants {size}"
            )


class ImageFolder(ImageData):
    """A folder per class, or train/, val/ and test/ folders of them. Images come out as RGB, upright, `size` square.

    The test set is test/, or val/ where there is no other. Without either the share `holdout` of the files is held out,
    chosen by the hash of their names. `listing.WORDS` has the words that name a set.
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
        test: FileName | FileSets | None = None,
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
        self.test = test
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
        elif self.test is not None and not (Path(self.root) / self.test).is_dir():
            yield f"data.test={self.test}: {self.root} has no such folder: name one, or set data.test=null"

    def load_whole(self, own: Splits) -> Splits | None:
        layout, not_read, doubts = self._layout()
        folder = layout.test or layout.train
        found = sorted(folder.folders)
        classes = found if own.names is None or not found else [one_form(name) for name in own.names]
        if unknown := sorted(set(found) - set(classes)):
            raise UserError(f"{self.root}/{folder.path} has classes that the run does not know: {', '.join(unknown[:5])}")
        if layout.test is not None and sorted(layout.train.folders) == classes:
            return None
        every = self._source(*self._files(folder, classes))
        origins = {"test": "the whole folder"} if layout.test is None else layout.origins("")
        looked = self.looked_at([every], own, not_read, doubts=doubts)
        return Splits(every, every, self.shape(), len(classes), names=classes, origins=origins, **looked)

    def _layout(self) -> tuple[listing.Layout, str, list[str]]:
        """Return the layout of the folder, what is not read in words, and what looks wrong. Raises UserError."""
        root = str(self.root)
        listed = listing.walk(root, IMAGES)
        layout = listing.find(root, listed, self.validation if isinstance(self.validation, str) else None, self.test)
        beside = Counter(f"{os.path.splitext(name)[1]} beside the class folders" for name in listing.strays(listed, layout.train))
        others = [f"{name}/" for name in layout.not_read if name not in self.beside]
        said = [", ".join(others), listing.said(listed.passed_over), listing.said(beside)]
        doubts = listing.doubts(root, listed)
        return layout, f"not read: {', '.join(filter(None, said))}" if any(said) else "", doubts

    def _source(self, paths: Sequence[str], targets: Sequence[int]) -> Images:
        return Images(str(self.root), paths, torch.tensor(targets), self.how())

    def load(self, device: torch.device) -> Splits:
        layout, not_read, doubts = self._layout()
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
        looked = self.looked_at(sources, None, not_read, doubts=doubts)
        left = self.verify_files
        for source in sources:
            for index in range(min(left, len(source))):
                source.sample(index)
            left -= min(left, len(source))
        return Splits(
            sources[0], sources[1], self.shape(), len(classes), names=classes, **looked,
            validation=sources[2] if len(sources) > 2 else None, origins=layout.origins(f"{self.holdout:g} of the files"),
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


TableKind = Literal["class", "labels", "values"]
Separator = Annotated[str, one_of(",", ";", "|", "/", " ")]


class LabelsCsv(ImageData):
    """Images, and a table beside them with a row for each: its file, and a class, several labels, or numbers.

    The share `holdout` of the images is held out, chosen by the hash of their names, unless there is a table for the test.
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
        delimiter: Delimiter | None = None,
        encoding: Encoding | None = None,
        size: Count = 224,
        crop_pct: CropShare = 1.0,
        holdout: Fraction = 0.1,
        validation: Fraction | FileName | Sets | None = 0.1,
        normalize: Normalization = "imagenet",
        range: Sequence[float] | None = None,
        max_pixels: Count = 50_000_000,
        on_error: OnError = "raise",
        max_skipped: MaxSkipped = 0.01,
        drop_last: bool = True,
        order: Sampling = "shuffled",
    ) -> None:
        self.path, self.test, self.root = (expanded(p) for p in (path, test, root))
        self.image, self.target, self.separator, self.kind = image, target, separator, kind
        self.delimiter, self.encoding = delimiter, encoding
        self.size, self.holdout, self.validation, self.normalize = size, holdout, validation, normalize
        self.max_pixels, self.range, self.crop_pct = max_pixels, range, crop_pct
        self.on_error, self.max_skipped, self.drop_last, self.order = on_error, max_skipped, drop_last, order

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not self.path:
            yield OperatorGives("data=labels_csv needs data.path, the table that has a row for each image")
        for knob, file in (("path", self.path), ("test", self.test), ("validation", beside(self.path, self.validation))):
            if file and not Path(file).is_file():
                yield f"data.{knob}={file} is no file: set it to a table ({KINDS})"
        if self.root and not Path(self.root).is_dir():
            yield f"data.root={self.root} is no directory: set it to the folder that the images' paths begin in"
        if not self.target:
            yield "data=labels_csv needs data.target, the column that is predicted (several: data.target=[a,b])"
        if self.separator is not None and self.targets != "labels":
            yield f"data.separator={self.separator} is for several labels in a cell: set task=multilabel, or data.separator=null"

    def load(self, device: torch.device) -> Splits:
        path, reader, own = Path(str(self.path)), self._reader(), beside(self.path, self.validation)
        rows, schema = self._rows(path, None)
        apart = Cells({self.image: rows.columns[self.image]}, "").held_out(self.holdout if self.test is None else 0.0)
        sets = [rows[~apart], rows[apart]] if self.test is None else [rows, self._rows(Path(self.test), schema)[0]]
        if not all(map(len, sets)):
            raise UserError(f"{path} gives {len(sets[0])} training and {len(sets[1])} test rows: set data.test or data.holdout")
        reader.learn(rows, sets[0])
        sets += [self._rows(own, schema)[0]] if own else []
        images = [self._images(part, reader.read(part)) for part in sets]
        doubts = [
            f"{len(twice)} images of data.{knob} are in training too, the first is {twice[0]}"
            for knob, source in zip(("test", "validation"), images[1:], strict=False)
            if (twice := sorted({*images[0].paths} & {*source.paths}))
        ]
        return Splits(
            images[0], images[1], self.shape(), reader.outputs, names=reader.classes, units=reader.units,
            validation=images[2] if own else None, files={KEPT: schema.to_json()}, **self.looked_at(images, doubts=doubts),
        )  # fmt: skip

    def describe_columns(self, data: Splits) -> Mapping[str, Sequence[str]]:
        targets = names_of(self.target)
        cells = open_table(Path(str(self.path)), form_of(self.delimiter, self.encoding)).cells((), [self.image, *targets])
        found = columns_of(Schema.from_json(data.files[KEPT]), cells, targets, data.names, {})
        found["became"][found["column"].index(self.image)] = "the image's file"
        return found

    def load_whole(self, own: Splits) -> Splits:
        with as_kept(KEPT):
            schema = Schema.from_json(own.files[KEPT])
        reader = self._reader()
        rows, _ = self._rows(self.other_file(), schema)
        every = self._images(rows, reader.read_known(rows, own))
        return Splits(
            every, every, self.shape(), reader.outputs, names=reader.classes, units=reader.units, files=own.files,
            origins=WHOLE, **self.looked_at([every], own),
        )  # fmt: skip

    def _reader(self) -> TargetReader:
        return TargetReader(self.targets or "class", names_of(self.target), "data.target", self.separator)

    def _rows(self, path: Path, schema: Schema | None) -> tuple[Cells, Schema]:
        """Return the images and targets in a table, and its schema, which is decided where none is given. Raises UserError."""
        table, targets = open_table(path, form_of(self.delimiter, self.encoding)), names_of(self.target)
        check_names([self.image], table.names, "data.image", path)
        check_names(targets, table.names, "data.target", path)
        cells = table.cells(() if schema is None else schema.plain, [self.image, *targets])
        if schema is None:
            texts = [self.image, *(targets if self.separator is not None else ())]
            schema = Schema.decided(cells, dict.fromkeys(texts, "category"), targets=targets)
        return schema.read(cells), schema

    def _images(self, rows: Cells, targets: torch.Tensor) -> Images:
        names = words_of(rows.columns[self.image])
        if (empty := absent(names)).any():
            raise DataError(
                f"{rows.place(int(empty.argmax()))}: there is no value in {self.image}, the image's file: remove the row"
            )
        folder = self.root or str(Path(rows.source).parent)
        lost = [name for name in names.texts if self.on_error == "raise" and not os.path.isfile(os.path.join(folder, name))]
        if lost:
            first = os.path.join(folder, lost[0])
            raise UserError(
                f"{rows.source} names {len(lost)} images that are not there, the first is {first}: set data.root, or "
                "data.on_error=skip"
            )
        return Images(folder, [names.texts[code] for code in names.codes.tolist()], targets, self.how())

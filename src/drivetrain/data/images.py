"""Image files: a folder for each class, or a table with a row for each."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from drivetrain.core.errors import DataError, OperatorGives, UserError, collecting, refuse, told
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.options.allowed import ColumnName, FileName, one_of
from drivetrain.core.options.option import Count, CountOrZero, RunSpec
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.data import listing
from drivetrain.data.base import (
    SPLITS,
    FileSets,
    FromFile,
    HeldOut,
    Normalize,
    Splits,
    Validation,
    hash_fractions,
    measure_on_some,
)
from drivetrain.data.cell_formats import words_of
from drivetrain.data.cells import Cells, absent
from drivetrain.data.decoding import (
    CropShare,
    Decoding,
    ImageFileSource,
    ImageSize,
    MaxSkipped,
    OnError,
    Range,
    check_pixels,
    of_values,
    open_image,
    sides,
    values_of,
)
from drivetrain.data.listing import IMAGES as IMAGES
from drivetrain.data.listing import Folder, one_form
from drivetrain.data.schema import TableSchema, check_names, columns_of, named
from drivetrain.data.tables import KINDS, open_table
from drivetrain.data.tabular import KEPT, Delimiter, Known, form_of, names_of
from drivetrain.data.target_reader import TargetReader
from drivetrain.data.untrusted import as_kept, read_image_file

IMAGENET = [255 * m for m in (0.485, 0.456, 0.406)], [255 * s for s in (0.229, 0.224, 0.225)]  # mean, standard deviation
Normalization = Literal["imagenet", "measured"]
ENLARGED, STEP = 1.5, 16  # times the shorter side; advised sizes are multiples of it

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class ImageData:
    """The common part of options whose samples are image files."""

    size: ImageSize = 224
    normalize: Normalization = "imagenet"
    range: Sequence[float] | None = None  # the values that become 0 and 255; None: the training files' range
    max_pixels: Count = 50_000_000

    def validate(self, run: RunSpec) -> Iterator[str]:
        if self.range is not None and (len(self.range) != 2 or not self.range[0] < self.range[1]):
            yield f"data.range={list(self.range)}: give the lowest and the highest value, such as [0,4095]"

    def shape(self) -> tuple[int, ...]:
        return (3, *sides(self.size))

    def decodes_images(self) -> bool:
        return True

    def how(self) -> Decoding:
        """Return the settings by which image files become samples."""
        return Decoding(self.size, self.max_pixels)

    def looked_at(
        self, sources: Sequence[tuple[str, ImageFileSource]], own: Splits | None = None, *more: str, doubts: Iterable[str] = ()
    ) -> dict[str, object]:
        """Give sources the range of their pixels: the user's, a run's `own`, or the range in the first source's files.

        Returns their properties for Splits: normalisation, range, a short description with `more`, and doubts. Raises DataError
        where there is no range, or all pixels are alike.
        """
        (height, width), seen = sides(self.size), Seen.of(train := sources[0][1])
        if self.range is not None:
            found: Range | None = Range(self.range[0], self.range[1], said=True)
        else:
            found = own.pixels if own is not None else seen.range()
        for _, source in sources:
            source.range = found
        normalize = own.normalize if own is not None else None
        if normalize is None:
            normalize = measure_on_some(train) if self.normalize == "measured" else Normalize(*IMAGENET)
        return {
            "normalize": normalize,
            "pixels": found,
            "inputs": "; ".join(filter(None, [f"inputs: {seen.described()}, as {width}×{height}", *more])),
            "doubts": [*doubts, *(seen.enlarged(self.size) if isinstance(self.size, int) else ())],
        }


@dataclass(kw_only=True, eq=False)
class PictureData(ImageData):
    """The common part of options that read the middle of image files, and may skip broken ones."""

    crop_pct: CropShare = 1.0
    on_error: OnError = "raise"
    max_skipped: MaxSkipped = 0.01

    def how(self) -> Decoding:
        return Decoding(self.size, self.max_pixels, self.crop_pct, self.on_error, self.max_skipped)


@dataclass
class Seen:
    """The properties of some files of a source, spread evenly."""

    files: int
    sizes: list[tuple[int, int]] = field(default_factory=list)  # width and height of the readable ones
    deep: int = 0  # files of more than 8 bits; of their values:
    low: float = math.inf
    high: float = -math.inf
    whole: bool = True  # whether all are whole numbers
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
                        seen.low = float(np.minimum(seen.low, values.min()))  # minimum keeps NaN
                        seen.high = float(np.maximum(seen.high, values.max()))
                        seen.whole = seen.whole and (values.dtype.kind != "f" or bool((values == np.rint(values)).all()))
                    elif len(seen.plain) < 2:
                        seen.plain.update(np.ravel(image.convert("RGB").getextrema()).tolist())
            except DataError as error:  # reported when it is read
                logger.debug("%s", error)
        return seen

    def range(self) -> Range | None:
        """Return the range of files of more than 8 bits; None where there are none. Raises DataError if all pixels are alike."""
        where = f"the {self.files} images that were looked at for their range"
        if not self.deep and len(self.plain) == 1:
            raise DataError(f"all pixels of {where} have the value {min(self.plain)}, so there is nothing to learn: mend them")
        return of_values(self.low, self.high, self.whole, where) if self.deep else None

    def described(self) -> str:
        """Return the sizes of the images in words, and their values if they have more than 8 bits."""
        if not self.sizes:
            return "images"
        ends = [min(self.sizes, key=math.prod), max(self.sizes, key=math.prod)]
        sizes = " to ".join(dict.fromkeys(f"{width}×{height}" for width, height in ends))
        if not self.deep or not math.isfinite(self.low + self.high):
            return f"images of {sizes}"
        found = of_values(self.low, self.high, self.whole, "")
        share = "" if self.deep == self.files else f" in {self.deep} of {self.files} files"
        return (
            f"images of {sizes} with values {self.low:g} to {self.high:g}{share}: {found.low:g} becomes black and "
            f"{found.high:g} white (data.range)"
        )

    def enlarged(self, size: int) -> Iterator[str]:
        """Yield advice if most images are much smaller than the size that they are resized to."""
        if not self.sizes:
            return
        side, (width, height) = sorted((min(each), each) for each in self.sizes)[len(self.sizes) // 2]
        if ENLARGED * side < size > (fitting := -(-side // STEP) * STEP):
            yield (
                f"the images are {width}×{height} and are enlarged to {size}×{size}, which costs time and shows no more: set "
                f"data.size={fitting}, unless the model wants {size}"
            )


class Images(ImageFileSource):
    """Image files as a source: `paths` from the folder `root`, all of them in its `folder`."""

    def __init__(self, root: str, paths: Sequence[str], targets: torch.Tensor, how: Decoding, folder: str = "") -> None:
        self.root, self.paths, self.folder = root, paths, folder
        super().__init__(how, targets)

    def content(self, index: int) -> bytes:
        return read_image_file(self.name(index), self.how.max_pixels)

    def name(self, index: int) -> str:
        return os.path.join(self.root, self.paths[index])

    def select(self, indices: torch.Tensor) -> None:
        super().select(indices)
        self.paths = [self.paths[i] for i in indices.tolist()]

    def identities(self) -> list[str]:
        """Return the files' paths below their common folder, which are the same on every machine."""
        if not self.paths:
            return []
        folder = len(os.path.commonpath([min(self.paths), max(self.paths)]))
        return [path[folder:] for path in self.paths]


class Folders(NamedTuple):
    """The found folders of images."""

    layout: listing.SetFolders
    classes: list[str]
    not_read: str  # in words
    doubts: list[str]


@dataclass(kw_only=True, eq=False)
class ImageFolder(PictureData, HeldOut[Images, Folders, Images]):
    """A folder per class, or train/, val/ and test/ folders of them. Images come out as RGB, upright, of `size`.

    The test set is test/, or val/ where there is no other. Without either the share `holdout` of the files is held out,
    chosen by the hash of their names. `listing.WORDS` has the words that name a set.
    Up to `verify` files are decoded before training starts, so that a broken one is found at once.
    With on_error=skip the next readable file replaces a broken one, up to `max_skipped` times (below 1: a share of the files).
    """

    machine_local_keys = ("root",)

    root: str | None = None
    test: FileName | FileSets | None = None
    validation: Validation = "auto"
    verify: CountOrZero = 1000

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not self.root:
            yield OperatorGives("data=imagefolder needs data.root, the folder that holds one folder per class")
        elif not Path(self.root).is_dir():
            yield f"data.root={self.root} is no directory: set it to the folder that holds one folder per class"
        else:
            named = [(split, folder) for split in SPLITS for folder in self.places(split).values()]
            for split, folder in named:
                if not (Path(self.root) / folder).is_dir():
                    yield f"data.{split}={folder}: {self.root} has no such folder: name one, or set data.{split}=null"

    def load_whole(self, own: Splits) -> Splits | None:
        known = self._folders()
        classes = known.classes if own.names is None else [one_form(name) for name in own.names]
        of_run, tests, train = known._replace(classes=classes), self.places("test", known), known.layout.train
        if tests and known.classes == classes:
            return None
        parts = {name: self.read_set(place, of_run, "test") for name, place in tests.items()}
        origins = known.layout.origins("") if tests else {"test": "the whole folder"}
        return self.judged(of_run, parts or {"": self._files(train, classes)}, own, origins)

    def _folders(self) -> Folders:
        """Return the folders of images, and remarks on them. Raises UserError."""
        root = str(self.root)
        listed = listing.walk(root, IMAGES)
        own, tests = (list(self.places(split).values()) for split in ("validation", "test"))
        layout = listing.find(root, listed, None if self.validation == "auto" else own, tests)
        beside = Counter(f"{os.path.splitext(n)[1]} next to the class folders" for n in listing.strays(listed, layout.train))
        others = ", ".join(f"{name}/" for name in layout.not_read)
        said = ", ".join(filter(None, [others, listing.said(listed.passed_over), listing.said(beside)]))
        return Folders(layout, sorted(layout.train.folders), f"not read: {said}" if said else "", listing.doubts(root, listed))

    def places(self, split: str, known: Folders | None = None) -> dict[str, str]:
        usual = {} if known is None else known.layout.test if split == "test" else known.layout.validation
        return super().places(split) or dict(zip([""], usual, strict=False))

    def read(self) -> tuple[Images, Folders]:
        known = self._folders()
        classes, train = known.classes, known.layout.train
        if len(classes) < 2 and self.targets == "class":
            raise UserError(
                f"{self.root}/{train.path} has {f'one class folder, {classes[0]}/' if classes else 'no class folders'}: "
                "data.root must hold one folder of images for each of two or more classes"
            )
        return self._files(train, classes), known

    def fractions(self, every: Images) -> np.ndarray:
        return hash_fractions((path[len(every.folder) :] for path in every.paths), len(every.paths))

    def read_set(self, place: str, known: Folders, split: str) -> Images:
        layout = known.layout
        folder = (layout.test if split == "test" else layout.validation)[one_form(place)]
        return self._files(folder, known.classes)

    def about(self, known: Folders, sources: Sequence[tuple[str, Images]], own: Splits | None) -> dict[str, object]:
        looked = self.looked_at(sources, own, known.not_read, doubts=known.doubts)
        left = self.verify if own is None else 0
        problems: list[str] = []
        for _, source in sources:
            with collecting(problems):
                for index in range(min(left, len(source))):
                    source.sample(index)
            left -= min(left, len(source))
        refuse(problems, DataError)
        origins = known.layout.origins(f"{self.holdout:g} of the files")
        return {"shape": self.shape(), "classes": len(known.classes), "names": known.classes, "origins": origins, **looked}

    def _files(self, folder: Folder, classes: list[str]) -> Images:
        """Return the files of each class. Raises UserError for a class without any, and for an unknown one."""
        if unknown := sorted(set(folder.folders) - set(classes)):
            raise UserError(f"{self.root}/{folder.path}: no training image has the class {named(unknown, 5)}")
        if empty := [inside.path for inside in folder.folders.values() if not inside.holds_files()]:
            where = ", ".join(f"{self.root}/{path}" for path in empty)
            raise UserError(f"no image in {where}: remove the empty class or add images ({' '.join(IMAGES)})")
        paths: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            if name in folder.folders:
                paths += folder.folders[name].every()
                labels += [label] * (len(paths) - len(labels))
        return Images(str(self.root), paths, torch.tensor(labels), self.how(), folder.path)


TableKind = Literal["class", "labels", "values"]
Separator = Annotated[str, one_of(",", ";", "|", "/", " ")]


@dataclass(kw_only=True, eq=False)
class LabelsCsv(PictureData, FromFile[Cells, Known, Images]):
    """Images, and a table with a row for each: its file, and a class, several labels, or numbers.

    The share `holdout` of the images is held out, chosen by the hash of their names, unless there is a table for the test.
    """

    machine_local_keys = ("path", "test", "root")
    samples_are: ClassVar[str] = "rows"
    reads_what: ClassVar[str] = f"a table with a row for each image ({KINDS})"
    reads: ClassVar[tuple[TargetKind, ...]] = ("class", "labels", "values")

    root: str | None = None
    image: ColumnName = "image"
    target: ColumnName | Sequence[ColumnName] | None = None
    separator: Separator | None = None
    kind: TableKind | None = None
    delimiter: Delimiter | None = None

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        yield from FromFile.validate(self, run)
        if self.root and not Path(self.root).is_dir():
            yield f"data.root={self.root} is no directory: set it to the folder that the images' paths begin in"
        if not self.target:
            yield "data=labels_csv needs data.target, the column that is predicted (several: data.target=[a,b])"
        if self.separator is not None and self.targets != "labels":
            yield f"data.separator={self.separator} is for several labels in a cell: set task=multilabel, or data.separator=null"

    def read(self) -> tuple[Cells, Known]:
        rows, schema = self._rows(str(self.path), None)
        return rows, (schema, self._reader(), None)

    def fractions(self, every: Cells) -> np.ndarray:
        return Cells({self.image: every.columns[self.image]}, "").fractions()

    def learn(self, known: Known, every: Cells, train: Cells) -> None:
        known[1].learn(every, train)

    def read_set(self, place: str, known: Known, split: str) -> Cells:
        return self._rows(place, known[0])[0]

    def about(self, known: Known, sources: Sequence[tuple[str, Images]], own: Splits | None) -> dict[str, object]:
        schema, reader, _ = known
        doubts = [
            f"{len(twice)} images of data.{split} are in training too, the first is {twice[0]}"
            for split, source in sources[1:]
            if own is None and (twice := sorted({*sources[0][1].paths} & {*source.paths}))
        ]
        looked = self.looked_at(sources, own, doubts=doubts)
        return {
            **reader.about(sources), "shape": self.shape(), "files": {KEPT: schema.to_json()}, **looked,
        }  # fmt: skip

    def describe_columns(self, data: Splits) -> Mapping[str, Sequence[str]]:
        targets = names_of(self.target)
        cells = open_table(Path(str(self.path)), form_of(self.delimiter, self.encoding)).cells((), [self.image, *targets])
        found = columns_of(TableSchema.from_json(data.files[KEPT]), cells, targets, data.names, {})
        found["became"][found["column"].index(self.image)] = "the image's file"
        return found

    def kept(self, own: Splits) -> Known:
        with as_kept(KEPT):
            return TableSchema.from_json(own.files[KEPT]), self._reader().of(own), None

    def _reader(self) -> TargetReader:
        return TargetReader(self.targets or "class", names_of(self.target), "data.target", self.separator)

    def _rows(self, path: str, schema: TableSchema | None) -> tuple[Cells, TableSchema]:
        """Return the images and targets in a table, and its schema, decided here if none is given. Raises UserError."""
        table, targets = open_table(Path(path), form_of(self.delimiter, self.encoding)), names_of(self.target)
        check_names([self.image], table.names, "data.image", path)
        check_names(targets, table.names, "data.target", path)
        cells = table.cells(() if schema is None else schema.plain, [self.image, *targets])
        if schema is None:
            texts = [self.image, *(targets if self.separator is not None else ())]
            schema = TableSchema.decided(cells, dict.fromkeys(texts, "category"), targets=targets)
        return schema.read(cells), schema

    def source(self, known: Known, part: Cells) -> Images:
        rows, names = part, words_of(part.columns[self.image])
        if (empty := absent(names)).any():
            raise DataError(
                f"{rows.place(int(empty.argmax()))}: there is no value in {self.image}, the image's file: remove the row"
            )
        folder = self.root or str(Path(rows.source).parent)
        lost = [name for name in names.texts if self.on_error == "raise" and not os.path.isfile(os.path.join(folder, name))]
        if lost:
            gone = [f"{os.path.join(folder, name)}, which {rows.source} names, is not there" for name in lost]
            mend = f"{len(lost)} images are not there: set data.root, or data.on_error=skip data.max_skipped={len(lost)}"
            raise UserError(told(gone, mend) if len(lost) > 1 else f"{gone[0]}: set data.root, or data.on_error=skip")
        return Images(folder, [names.texts[code] for code in names.codes.tolist()], known[1].read(rows), self.how())

"""Image files and a table beside them, with a row for each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from drivetrain.core.allowed import ColumnName, FileName, one_of
from drivetrain.core.errors import OperatorGives, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, RunSpec
from drivetrain.core.order import Sampling
from drivetrain.core.targets import TargetKind
from drivetrain.data.bad_samples import MaxSkipped, OnError
from drivetrain.data.base import WHOLE, Fraction, Sets, Splits, beside
from drivetrain.data.columns import Columns, column, held_out, missing, number_of_rows, read_columns, rows_of
from drivetrain.data.decoding import CropShare
from drivetrain.data.images import ImageData, Images, Normalization, image_normalization
from drivetrain.data.named_sets import expanded
from drivetrain.data.targets import TargetReader

TableKind = Literal["class", "labels", "values"]
Separator = Annotated[str, one_of(",", ";", "|", "/", " ")]


class LabelsCsv(ImageData):
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
        kind: TargetKind = self.targets or "class"
        return TargetReader(kind, names, path, "data.target", self.separator)

    def _images(self, columns: Columns, targets: torch.Tensor, table: Path) -> Images:
        names = column(columns, self.image, "data.image", table)
        if (empty := missing(names)).any():
            raise UserError(f"{table}: {int(empty.sum())} rows have no value in {self.image}, the image's file: remove them")
        folder = self.root or str(table.parent)
        files = [str(name) for name in names]
        if absent := [file for file in files if not os.path.isfile(os.path.join(folder, file))]:
            first = os.path.join(folder, absent[0])
            raise UserError(f"{table} names {len(absent)} images that are not there, the first is {first}: set data.root")
        return Images(folder, files, targets, self.how())

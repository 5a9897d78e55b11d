"""Image files and a table beside them, with a row for each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from drivetrain.core.allowed import ColumnName, FileName, one_of
from drivetrain.core.errors import DataError, OperatorGives, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, RunSpec
from drivetrain.core.order import Sampling
from drivetrain.core.targets import TargetKind
from drivetrain.data.bad_samples import MaxSkipped, OnError
from drivetrain.data.base import WHOLE, Fraction, Sets, Splits, beside
from drivetrain.data.decoding import CropShare
from drivetrain.data.images import ImageData, Images, Normalization
from drivetrain.data.named_sets import expanded
from drivetrain.data.schema import Schema, check_names, words_of
from drivetrain.data.tables import KINDS, Cells, absent, open_table
from drivetrain.data.tabular import KEPT, Delimiter, form_of, names_of
from drivetrain.data.targets import TargetReader
from drivetrain.data.untrusted import Encoding, as_kept

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

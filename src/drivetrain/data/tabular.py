"""Tables: rows of numbers and categories, from CSV, Parquet or NumPy files, and two of scikit-learn's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from drivetrain.core import rng
from drivetrain.core.allowed import ColumnName, FileName
from drivetrain.core.errors import OperatorGives, UserError, did_you_mean
from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.core.order import Sampling
from drivetrain.core.targets import TargetKind
from drivetrain.data.base import WHOLE, Data, Fraction, Sets, Splits, Tensors, beside, number_apart
from drivetrain.data.columns import (
    FORMATS,
    Columns,
    cells,
    contents,
    csv_rows,
    held_out,
    missing,
    named,
    number_of_rows,
    read_columns,
    rows_of,
    typed,
)
from drivetrain.data.encoder import Encoder
from drivetrain.data.named_sets import expanded
from drivetrain.data.scikit_learn import read_diabetes, read_wine
from drivetrain.data.targets import TargetReader
from drivetrain.data.untrusted import as_kept

KEPT = "table.json"  # in the run's directory: how rows become inputs
TableKind = Literal["class", "values", "labels"]


class Table(Data):
    """The base of tables; predictions are for rows of a table with the same columns."""

    max_value = None
    missing = "refuse"
    input_files = FORMATS

    def read_inputs(self, file: Path | Iterable[str], data: Splits) -> Iterator[Callable[[], torch.Tensor]]:
        encoder = _encoder(data)
        names, rows = _rows_of_file(file) if isinstance(file, Path) else _rows_of_lines(file)
        there = set(names)
        if absent := [name for name in encoder.names if name not in there]:
            source = file if isinstance(file, Path) else "standard input"
            raise UserError(f"{source} has no column {named(absent)}: the model's inputs are {named(encoder.names)}")
        return (lambda row=row: encoder.row(row(), self.missing == "fill") for row in rows)  # type: ignore[misc]


def _encoder(data: Splits) -> Encoder:
    """The run's encoder. Raises UserError where it is none, or makes other inputs than the model's."""
    with as_kept(KEPT):
        encoder = Encoder.from_json(data.files[KEPT])
        if (encoder.outputs,) != tuple(data.shape):
            raise ValueError(f"its columns make {encoder.outputs} inputs, and the model takes {list(data.shape)}")
    return encoder


Row = Callable[[], Columns]  # reads one row


def _rows_of_file(path: Path) -> tuple[Iterable[str], Iterator[Row]]:
    columns = read_columns(path)
    return columns, (partial(rows_of, columns, slice(n, n + 1)) for n in range(number_of_rows(columns)))


def _rows_of_lines(lines: Iterable[str]) -> tuple[Iterable[str], Iterator[Row]]:
    """The rows of a CSV, of which no more are read than are used."""
    names, rows = csv_rows(lines, "standard input")

    def columns(row: list[str], number: int) -> Columns:
        return {name: typed([cell]) for name, cell in zip(names, cells(row, names, f"row {number}"), strict=True)}

    return names, (partial(columns, row, number) for number, row in enumerate(rows, 2))


class Tabular(Table):
    """A table (CSV, Parquet, NumPy) whose columns `target` are what is predicted, and whose other columns are the inputs.

    Numbers are standardised by the training rows, texts become one column for each category. Without a table of its own for
    the test, the share `holdout` of the rows is held out, chosen by the hash of their content.
    """

    machine_local_keys = ("path", "test")
    targets = "class"
    reads: ClassVar[tuple[TargetKind, ...]] = ("class", "values", "labels")

    def __init__(
        self,
        path: str | None = None,
        test: str | dict[str, str] | None = None,
        target: ColumnName | Sequence[ColumnName] | None = None,
        columns: Sequence[ColumnName] | None = None,
        categories: Sequence[ColumnName] = (),
        kind: TableKind | None = None,
        missing: Literal["refuse", "fill"] = "refuse",
        normalize: bool = True,
        holdout: Fraction = 0.2,
        validation: Fraction | FileName | Sets | None = 0.1,
        drop_last: bool = False,
        order: Sampling = "shuffled",
    ) -> None:
        self.path, self.test = (expanded(p) for p in (path, test))
        self.target, self.columns, self.categories = target, columns, categories
        self.kind, self.missing = kind, missing
        self.normalize, self.holdout, self.validation, self.drop_last, self.order = (
            normalize,
            holdout,
            validation,
            drop_last,
            order,
        )

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.path:
            yield OperatorGives("data=tabular needs data.path, a table in a file (CSV, Parquet or NumPy)")
        for knob, file in (("path", self.path), ("test", self.test), ("validation", beside(self.path, self.validation))):
            if file and not Path(file).is_file():
                yield f"data.{knob}={file} is no file: set it to a table (CSV, Parquet or NumPy)"
        if not self.target:
            yield "data=tabular needs data.target, the column that is predicted (several: data.target=[a,b])"

    def load(self, device: torch.device) -> Splits:
        path = Path(str(self.path))
        train = read_columns(path)
        if self.test is not None:
            test = read_columns(Path(self.test))
        else:
            apart = held_out(train, self.holdout)
            if apart.all() or not apart.any():
                raise UserError(
                    f"{path} gives {(~apart).sum()} training and {apart.sum()} test rows: set data.test or data.holdout"
                )
            train, test = rows_of(train, ~apart), rows_of(train, apart)
        assert self.targets is not None
        targets = self._targets()
        reader = TargetReader(self.targets, targets, path, "data.target")
        y = reader.learn(train)
        names, own = self._inputs(train, targets, path), beside(self.path, self.validation)
        validation = read_columns(own) if own else None
        for setting, others in ((f"test={self.test}", test), (f"validation={own}", validation or test)):
            if absent := [name for name in (*names, *targets) if name not in others]:
                raise UserError(f"data.{setting} has no column {named(absent)}, which {path} has")
        for rows, file in ((train, path), (test, Path(self.test or path)), (validation or test, own or path)):
            self._refuse_missing(rows, names, file)
        return encoded_splits(train, test, names, reader, y, self.categories, self.normalize, validation)

    def load_whole(self, own: Splits) -> Splits:
        path = self.other_file()
        rows, encoder = read_columns(path), _encoder(own)
        reader = TargetReader(self.targets or "class", self._targets(), path, "data.target")
        if absent := [name for name in (*encoder.names, *reader.names) if name not in rows]:
            raise UserError(f"{path} has no column {named(absent)}, which the run's own table has")
        self._refuse_missing(rows, encoder.names, path)
        every = Rows(encoder(rows), reader.read_known(rows, own), rows)
        return Splits(
            every, every, (encoder.outputs,), reader.outputs, None, reader.classes, units=reader.units,
            files={KEPT: own.files[KEPT]}, origins=WHOLE,
        )  # fmt: skip

    def _targets(self) -> list[str]:
        return [self.target] if isinstance(self.target, str) else list(self.target or ())

    def _inputs(self, train: Columns, targets: Sequence[str], path: Path) -> list[str]:
        """Return the names of the input columns. Raises UserError."""
        names = list(self.columns) if self.columns is not None else [name for name in train if name not in targets]
        for setting, given in (("data.columns", names), ("data.categories", self.categories)):
            for name in given:
                if name not in train:
                    raise UserError(f"{setting}: {name} is no column of {path}: {did_you_mean(name, train)}")
        if both := [name for name in names if name in targets]:
            raise UserError(f"data.columns has the target {named(both)}: the model would be given what it is to predict")
        if not names:
            raise UserError(f"{path} has no column beside the target: there is nothing to predict it from")
        return names

    def _refuse_missing(self, columns: Columns, names: Sequence[str], path: Path) -> None:
        gaps = {name: int(missing(columns[name]).sum()) for name in names} if self.missing == "refuse" else {}
        if found := [f"{name} ({count})" for name, count in gaps.items() if count]:
            raise UserError(
                f"{path} has rows without a value in {named(found)}: set data.missing=fill (numbers: the mean of the training "
                "rows; texts: a category of their own), leave columns out by data.columns, or mend the table"
            )


class Rows(Tensors):
    """The rows of a table as a source, which know their content as it was before it was encoded."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, columns: Columns) -> None:
        super().__init__(x, y)
        self._columns = columns

    def subset(self, indices: torch.Tensor) -> Rows:
        made = Rows(self._x, self._y, self._columns)
        made._rows = indices if self._rows is None else self._rows[indices]
        return made

    def identities(self) -> list[str]:
        """Return the content of each row."""
        found = contents(self._columns)
        return found if self._rows is None else [found[row] for row in self._rows.tolist()]


def encoded_splits(
    train: Columns,
    test: Columns,
    names: Sequence[str],
    reader: TargetReader,
    y: torch.Tensor,
    categories: Sequence[ColumnName] = (),
    normalize: bool = True,
    validation: Columns | None = None,
) -> Splits:
    """Return the rows as inputs and targets; `y` are the training rows' targets, of which `reader` has learned."""
    encoder = Encoder.learned(train, names, categories, normalize)
    sources = Rows(encoder(train), y, train), Tensors(encoder(test), reader.read(test))
    own = None if validation is None else Tensors(encoder(validation), reader.read(validation))
    shape = tuple(sources[0].x.shape[1:])
    files = {KEPT: encoder.to_json()}
    return Splits(*sources, shape, reader.outputs, None, reader.classes, units=reader.units, files=files, validation=own)


class ScikitLearn(Table):
    """A table that comes with scikit-learn. Nothing is downloaded. The same rows are held out in every run."""

    rows: ClassVar[int]
    inputs: ClassVar[int]
    target: ClassVar[str]

    def __init__(
        self,
        holdout: Fraction = 0.2,
        validation: Fraction | None = 0.2,
        normalize: bool = True,
        drop_last: bool = False,
        order: Sampling = "shuffled",
    ) -> None:
        self.holdout, self.validation, self.normalize, self.drop_last, self.order = (
            holdout,
            validation,
            normalize,
            drop_last,
            order,
        )

    def shape(self) -> tuple[int, ...]:
        return (self.inputs,)

    def loaded_samples(self) -> int:
        return self.rows - number_apart(self.rows, self.holdout)

    def read(self) -> Columns:
        """Return the table's columns."""
        raise NotImplementedError

    def load(self, device: torch.device) -> Splits:
        columns = self.read()
        order = rng.permutation(0, 0, number_of_rows(columns)).numpy()
        apart = number_apart(len(order), self.holdout)
        train, test = ({name: values[chosen] for name, values in columns.items()} for chosen in (order[apart:], order[:apart]))
        assert self.targets is not None
        reader = TargetReader(self.targets, [self.target], Path(), "target")
        y = reader.learn(train)
        names = [name for name in columns if name != self.target]
        return encoded_splits(train, test, names, reader, y, normalize=self.normalize)


class Diabetes(ScikitLearn):
    """442 patients: ten measurements, and the progress of the illness a year later (Efron et al. 2004)."""

    rows, inputs, target = 442, 10, "progression"
    targets = "values"

    def read(self) -> Columns:
        return read_diabetes()


class Wine(ScikitLearn):
    """178 wines from three growers: thirteen measurements, and the grower (Forina et al., UCI 1991)."""

    rows, inputs, target = 178, 13, "grower"
    targets = "class"

    def read(self) -> Columns:
        return read_wine()

"""Tables: rows of numbers and categories, from CSV, Parquet or NumPy files, and two of scikit-learn's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from drivetrain.core import rng
from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.core.targets import TargetKind
from drivetrain.data.base import Data, Fraction, Splits, Tensors, beside
from drivetrain.data.columns import Columns, contents, held_out, is_text, missing, named, number_of_rows, read_columns, rows_of
from drivetrain.data.scikit_learn import read_diabetes, read_wine
from drivetrain.data.targets import TargetReader

if TYPE_CHECKING:
    import numpy as np

TableKind = Literal["class", "values", "labels"]
MAX_CATEGORIES = 1000  # of one column; more are texts or numbers of rows, not categories
NO_VALUE = "(missing)"  # the category of a missing text


@dataclass
class Encoded:
    """How one column becomes inputs: a category's columns of 0 and 1, or a number's standardised value."""

    name: str
    categories: Sequence[str] | None = None  # None: a number
    mean: float = 0.0  # also what fills a missing number
    std: float = 1.0

    def __call__(self, columns: Columns) -> torch.Tensor:
        """Return float32 (n, outputs). A category that no training row has is all zeros."""
        import numpy as np

        values = columns[self.name]
        if self.categories is None:
            numbers = torch.from_numpy(np.where(np.isnan(values), self.mean, values))
            return ((numbers - self.mean) / self.std).float().unsqueeze(1)
        code_of = {category: number for number, category in enumerate(self.categories)}
        codes = torch.tensor([code_of.get(cell, len(code_of)) for cell in _category_cells(values)])
        return torch.nn.functional.one_hot(codes, len(code_of) + 1)[:, :-1].float()


@dataclass
class Encoder:
    """Turns columns into inputs (n, d). Its means, deviations and categories are those of the training rows."""

    columns: list[Encoded]

    @classmethod
    def learned(cls, train: Columns, names: Sequence[str], categories: Sequence[str], normalize: bool) -> Encoder:
        """Return the encoder of these columns; texts and the columns named in `categories` are categories."""
        import numpy as np

        encoded = []
        for name in names:
            values = train[name]
            if is_text(values) or name in categories:
                encoded.append(Encoded(name, _categories(name, values)))
                continue
            known = values[~np.isnan(values)]
            std = float(known.std()) if len(known) else 0.0
            mean = float(known.mean()) if len(known) else 0.0
            encoded.append(Encoded(name, None, mean, (std or 1.0) if normalize else 1.0))
            if not normalize:
                encoded[-1].mean = 0.0
        return cls(encoded)

    def __call__(self, columns: Columns) -> torch.Tensor:
        """Return inputs float32 (n, d)."""
        return torch.cat([encoded(columns) for encoded in self.columns], 1)

    def to_json(self) -> str:
        """Return the encoder as text, to be kept with the run."""
        return json.dumps([asdict(encoded) for encoded in self.columns], indent=1)

    @classmethod
    def from_json(cls, text: str) -> Encoder:
        """Return the encoder that `to_json` wrote."""
        return cls([Encoded(**entry) for entry in json.loads(text)])


def _categories(name: str, values: np.ndarray) -> list[str]:
    found = sorted(set(_category_cells(values)))
    if len(found) > MAX_CATEGORIES:
        raise UserError(
            f"the column {name} has {len(found):,} different texts, and each would become an input: leave it out by data.columns"
        )
    return found


def _category_cells(values: np.ndarray) -> list[str]:
    return [NO_VALUE if cell is None or cell != cell else str(cell) for cell in values.tolist()]


class Tabular(Data):
    """A table (CSV, Parquet, NumPy) whose columns `target` are what is predicted, and whose other columns are the inputs.

    Numbers are standardised by the training rows, texts become one column for each category. Without a table of its own for
    the test, the share `holdout` of the rows is held out, chosen by the hash of their content.
    """

    machine_local_keys = ("path", "test")
    max_value = None
    targets = "class"
    reads: ClassVar[tuple[TargetKind, ...]] = ("class", "values", "labels")

    def __init__(
        self,
        path: str | None = None,
        test: str | None = None,
        target: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        categories: Sequence[str] = (),
        kind: TableKind | None = None,
        missing: Literal["refuse", "fill"] = "refuse",
        normalize: bool = True,
        holdout: Fraction = 0.2,
        validation: Fraction | str | None = 0.1,
        drop_last: bool = False,
    ) -> None:
        self.path, self.test = (os.path.expanduser(p) if p else None for p in (path, test))
        self.target, self.columns, self.categories = target, columns, categories
        self.kind, self.missing = kind, missing
        self.normalize, self.holdout, self.validation, self.drop_last = normalize, holdout, validation, drop_last

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.path:
            yield "data=tabular needs data.path, a table in a file (CSV, Parquet or NumPy)"
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
        targets = [self.target] if isinstance(self.target, str) else list(self.target or ())
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
        self.identities = lambda: contents(columns)


def encoded_splits(
    train: Columns,
    test: Columns,
    names: Sequence[str],
    reader: TargetReader,
    y: torch.Tensor,
    categories: Sequence[str] = (),
    normalize: bool = True,
    validation: Columns | None = None,
) -> Splits:
    """Return the rows as inputs and targets; `y` are the training rows' targets, of which `reader` has learned."""
    encoder = Encoder.learned(train, names, categories, normalize)
    sources = Rows(encoder(train), y, train), Tensors(encoder(test), reader.read(test))
    own = None if validation is None else Tensors(encoder(validation), reader.read(validation))
    shape = tuple(sources[0].x.shape[1:])
    files = {"table.json": encoder.to_json()}
    return Splits(*sources, shape, reader.outputs, None, reader.classes, units=reader.units, files=files, validation=own)


class ScikitLearn(Data):
    """A table that comes with scikit-learn. Nothing is downloaded. The same rows are held out in every run."""

    max_value = None
    rows: ClassVar[int]
    inputs: ClassVar[int]
    target: ClassVar[str]

    def __init__(
        self, holdout: Fraction = 0.2, validation: Fraction | None = 0.2, normalize: bool = True, drop_last: bool = False
    ) -> None:
        self.holdout, self.validation, self.normalize, self.drop_last = holdout, validation, normalize, drop_last

    def shape(self) -> tuple[int, ...]:
        return (self.inputs,)

    def loaded_samples(self) -> int:
        return self.rows - round(self.rows * self.holdout)

    def read(self) -> Columns:
        """Return the table's columns."""
        raise NotImplementedError

    def load(self, device: torch.device) -> Splits:
        columns = self.read()
        order = rng.permutation(0, 0, number_of_rows(columns)).numpy()
        apart = round(len(order) * self.holdout)
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

"""Reading targets from columns of a table: a class, several labels, or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.targets import TargetKind
from drivetrain.data.base import Splits, Units
from drivetrain.data.columns import Columns, as_text, column, is_text, missing

if TYPE_CHECKING:
    import numpy as np


@dataclass
class TargetReader:
    """Turns the columns `names` into targets of one kind. What it learns comes from the training rows."""

    kind: TargetKind
    names: Sequence[str]
    path: Path  # for messages
    setting: str  # that names the columns, for messages
    separator: str | None = None  # between several labels in one cell
    classes: Sequence[str] | None = None  # of the outputs, once `learn` has found them; None for values
    units: Units | None = None

    def learn(self, train: Columns) -> torch.Tensor:
        """Find the classes, or the values' mean and deviation, in the training rows; return their targets."""
        if self.kind == "class":
            self.classes = _sorted_classes(self._cells(train, self._only_name()))
        elif self.kind == "labels":
            self.classes = list(self.names) if self.separator is None else self._labels_found(train)
        else:
            values = self._numbers(train)
            std = values.std(0, correction=0)
            self.units = Units(values.mean(0).float(), torch.where(std > 0, std, 1.0).float())
        return self.read(train)

    def read_known(self, columns: Columns, own: Splits) -> torch.Tensor:
        """Return the targets of rows by the classes, or the mean and deviation, of a run's own data. Raises UserError."""
        if self.kind == "values":
            if own.units is None or len(own.units.mean) != len(self.names):
                raise UserError(f"{self.setting}={list(self.names)}: the run does not predict so many numbers")
            self.units = own.units
            return self.read(columns)
        if own.names is None:
            return self.learn(columns)
        self.classes = list(own.names)
        if self.kind == "labels" and self.separator is None and self.classes != list(self.names):
            raise UserError(f"{self.setting}={list(self.names)}: the run's labels are {', '.join(self.classes[:10])}")
        return self.read(columns)

    def read(self, columns: Columns) -> torch.Tensor:
        """Return the targets of rows: class numbers (n,) int64, labels (n, k) of 0 and 1, or standardised values (n, k)."""
        if self.kind == "class":
            return self._class_numbers(columns)
        if self.kind == "labels":
            return self._marked(columns) if self.separator is None else self._split_labels(columns)
        assert self.units is not None
        return (self._numbers(columns).float() - self.units.mean) / self.units.std

    @property
    def outputs(self) -> int:
        """The number of the model's outputs."""
        return len(self.names) if self.classes is None else len(self.classes)

    def _only_name(self) -> str:
        if len(self.names) != 1:
            raise UserError(
                f"{self.setting}={list(self.names)}: a class is one column: name one, or set data.kind=labels or values"
            )
        return self.names[0]

    def _cells(self, columns: Columns, name: str) -> np.ndarray:
        values = column(columns, name, self.setting, self.path)
        if (empty := missing(values)).any():
            raise UserError(
                f"{self.path}: {int(empty.sum())} rows have no value in the target column {name}, the first is row "
                f"{int(empty.argmax()) + 1} of its data: remove them"
            )
        return values

    def _class_numbers(self, columns: Columns) -> torch.Tensor:
        assert self.classes is not None
        numbers = {name: number for number, name in enumerate(self.classes)}
        cells = [as_text(value) for value in self._cells(columns, self._only_name())]
        if unknown := sorted(set(cells) - set(numbers)):
            hint = ": if it is a number to predict, set task=regression" if all(map(_is_number, unknown)) else ""
            raise UserError(f"{self.path}: no training row has the class {', '.join(unknown[:5])} of {self.names[0]}{hint}")
        return torch.tensor([numbers[cell] for cell in cells])

    def _numbers(self, columns: Columns) -> torch.Tensor:
        """Return the columns as float64 (n, k)."""
        found = []
        for name in self.names:
            values = self._cells(columns, name)
            if is_text(values):
                raise UserError(
                    f"{self.path}: the target column {name} holds texts, such as {values[0]!r}, and regression wants numbers: "
                    "set task=classification"
                )
            found.append(torch.from_numpy(values))
        return torch.stack(found, 1)

    def _marked(self, columns: Columns) -> torch.Tensor:
        values = self._numbers(columns)
        if bool(((values != 0) & (values != 1)).any()):
            raise UserError(f"{self.path}: columns of labels hold 0 and 1, and {', '.join(self.names)} hold other numbers")
        return values.float()

    def _labels_found(self, columns: Columns) -> list[str]:
        return sorted({label for row in self._split(columns) for label in row})

    def _split(self, columns: Columns) -> list[list[str]]:
        """Return each row's labels; a row without any is one that has none."""
        cells = column(columns, self._only_name(), self.setting, self.path)
        empty = missing(cells)
        texts = ["" if none else as_text(cell) for cell, none in zip(cells, empty, strict=True)]
        return [[part.strip() for part in text.split(self.separator) if part.strip()] for text in texts]

    def _split_labels(self, columns: Columns) -> torch.Tensor:
        assert self.classes is not None
        numbers = {name: number for number, name in enumerate(self.classes)}
        rows = self._split(columns)
        if unknown := sorted({label for row in rows for label in row} - set(numbers)):
            raise UserError(f"{self.path}: no training row has the label {', '.join(unknown[:5])}")
        target = torch.zeros(len(rows), len(numbers))
        for n, row in enumerate(rows):
            target[n, [numbers[label] for label in row]] = 1.0
        return target


def _sorted_classes(values: np.ndarray) -> list[str]:
    """Return the names of the classes, numbers in their order."""
    return [as_text(value) for value in sorted(set(values.tolist()))]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

"""Reads the targets of every source: classes, labels or numbers, in columns of cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.step.source import Source
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.data.base import Splits, Units
from drivetrain.data.cell_formats import as_text, words_of
from drivetrain.data.cells import Cells, Words, absent
from drivetrain.data.schema import mean_and_std, named
from drivetrain.data.tables import is_number
from drivetrain.data.untrusted import number_of_classes


@dataclass
class TargetReader:
    """Reads the targets of every source, in the columns `names` of its cells.

    Their classes come from all rows of the training file, their scale from the rows that train. The targets of every other set
    are read with these.
    """

    kind: TargetKind
    names: Sequence[str]
    setting: str  # with the names of the columns, for messages
    separator: str | None = None  # between several labels in one cell
    classes: Sequence[str] | None = None  # of the outputs, once known; None for values, and for numbers without names
    numbered: bool = False  # whole numbers are class numbers, and classes have no names
    hint: str = ""  # the setting for cells without a value
    units: Units | None = None

    def learn(self, rows: Cells, train: Cells) -> None:
        """Find the classes in all rows of the training file, or the values' mean and deviation in the rows that train."""
        if self.kind == "values":
            self._numbers(rows)
            scales = [mean_and_std(values) for values in self._numbers(train).T]
            self.units = Units(*map(torch.tensor, zip(*scales, strict=True)))
        elif self.kind == "labels" and self.separator is None:
            self.classes = list(self.names)
        elif self.classes is None:
            values = self._column(rows)
            if isinstance(values, Words) or self.separator is not None:
                self.classes = sorted({name for parts in self._parts(words_of(values)) for name in parts})
            elif not self.numbered:
                self.classes = [as_text(number) for number in sorted(set(values.tolist()))]

    def of(self, own: Splits) -> Self:
        """Return the reader with the classes, or the mean and deviation, of a run's own data. Raises UserError."""
        self.units, self.classes = own.units, None if own.names is None else list(own.names)
        if self.kind == "values" and (own.units is None or len(own.units.mean) != len(self.names)):
            raise UserError(f"{self.setting}={list(self.names)}: the run does not predict so many numbers")
        if self.kind == "labels" and self.separator is None and self.classes not in (None, list(self.names)):
            raise UserError(f"{self.setting}={list(self.names)}: the run's labels are {named(self.classes or ())}")
        return self

    def read(self, rows: Cells) -> torch.Tensor:
        """Return the targets of rows: class numbers (n,) int64, labels (n, k) of 0 and 1, or standardised values (n, k)."""
        if self.kind == "class" or self.separator is not None:
            return self._as_numbers(rows) if self.classes is None else self._by_name(rows, self.classes)
        values = self._numbers(rows)
        if self.units is not None:
            return (torch.from_numpy(values).float() - self.units.mean) / self.units.std
        if ((values != 0) & (values != 1)).any():
            raise DataError(f"{rows.source}: columns of labels hold 0 and 1, and {', '.join(self.names)} hold other numbers")
        return torch.from_numpy(values).float()

    def about(self, sources: Sequence[tuple[str, Source]], classes: int | None = None) -> dict[str, object]:
        """Return the properties of the sources' targets for Splits, training first; `classes` is the user's number of them.

        Raises DataError for an impossible class number.
        """
        outputs = len(self.classes or self.names)
        if self.kind == "class" and self.classes is None:
            labels = [source.labels() for _, source in sources]
            highest = max(int(each.max()) for each in labels if each is not None)
            outputs = number_of_classes(highest, len(sources[0][1]), classes, self.setting)
        return {"classes": outputs, "names": self.classes, "units": self.units}

    def _column(self, rows: Cells) -> np.ndarray | Words:
        """Return the one column of classes or labels; a row may have no labels."""
        if len(self.names) != 1:
            raise UserError(
                f"{self.setting}={list(self.names)}: a class is one column: name one, or set data.kind=labels or values"
            )
        return self._known(rows, self.names[0]) if self.kind == "class" else rows.columns[self.names[0]]

    def _known(self, rows: Cells, name: str) -> np.ndarray | Words:
        values = rows.columns[name]
        if (empty := absent(values)).any():
            count = int(empty.sum())
            raise DataError(
                f"{rows.these(empty)} {'has' if count == 1 else 'have'} no value in the target column {name}, {count} of "
                f"{len(empty):,} rows: remove {'it' if count == 1 else 'them'}{self.hint}"
            )
        return values

    def _as_numbers(self, rows: Cells) -> torch.Tensor:
        """Return whole numbers as class numbers."""
        values, name = self._column(rows), self.names[0]
        numbers = np.full(len(values), -1.0) if isinstance(values, Words) else values
        if (wrong := (numbers < 0) | (numbers != np.rint(numbers))).any():
            row = int(wrong.argmax())
            found = repr(values.texts[values.codes[row]]) if isinstance(values, Words) else f"{values[row]:g}"
            raise DataError(f"{rows.these(wrong)}: the class {found} of {name} is no whole number from 0 on, as others are")
        return torch.from_numpy(numbers).long()

    def _by_name(self, rows: Cells, classes: Sequence[str]) -> torch.Tensor:
        """Return the classes or labels of words, as the numbers of their names."""
        words = words_of(self._column(rows), classes)
        parts, numbers = self._parts(words), {name: number for number, name in enumerate(classes)}
        wrong = np.isin(words.codes, [n for n, names in enumerate(parts) if not numbers.keys() >= {*names}])
        if wrong.any():
            unknown = sorted({name for n in np.unique(words.codes[wrong]).tolist() for name in parts[n]} - numbers.keys())
            hint = ": others have names" if self.numbered else ": if it is a number to predict, set task=regression"
            raise DataError(
                f"{rows.these(wrong)}: no training row has the {'class' if self.kind == 'class' else 'label'} "
                f"{named(unknown, 5)} of {self.names[0]}{hint if all(map(is_number, unknown)) else ''}"
            )
        codes = torch.from_numpy(words.codes).long()
        if self.kind == "class":
            return torch.tensor([numbers.get(name, 0) for (name,) in parts], dtype=torch.int64)[codes]
        target = torch.zeros(len(parts) + 1, len(numbers))  # the last row is for rows without a word
        for n, names in enumerate(parts):
            target[n, [numbers[name] for name in names if name in numbers]] = 1.0
        return target[codes]

    def _parts(self, words: Words) -> list[list[str]]:
        """Return the names in each word."""
        if self.separator is None:
            return [[text] for text in words.texts]
        return [[part.strip() for part in text.split(self.separator) if part.strip()] for text in words.texts]

    def _numbers(self, rows: Cells) -> np.ndarray:
        """Return the columns as float64 (n, k). Truths are 1 and 0."""
        found = []
        for name in self.names:
            values = self._known(rows, name)
            if isinstance(values, Words) and set(values.texts) <= {"true", "false"}:
                values = np.array([text == "true" for text in values.texts], float)[values.codes]
            if isinstance(values, Words):
                raise DataError(
                    f"{rows.place(0)}: the target column {name} holds texts, such as {values.texts[values.codes[0]]!r}, and "
                    "regression wants numbers: set task=classification, or data.columns={" + name + ": number}"
                )
            found.append(values)
        return np.stack(found, 1)

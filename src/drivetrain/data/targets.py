"""Reading targets from columns of a table: a class, several labels, or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.targets import TargetKind
from drivetrain.data.base import Splits, Units
from drivetrain.data.schema import as_text, mean_and_std, named, words_of
from drivetrain.data.tables import Cells, Words, absent


@dataclass
class TargetReader:
    """Turns the columns `names` into targets of one kind. Their scale comes from the training rows, their classes from all."""

    kind: TargetKind
    names: Sequence[str]
    setting: str  # that names the columns, for messages
    separator: str | None = None  # between several labels in one cell
    classes: Sequence[str] | None = None  # of the outputs, once `learn` has found them; None for values
    units: Units | None = None

    def learn(self, rows: Cells, train: Cells) -> None:
        """Find the classes in all rows of the training file, or the values' mean and deviation in those that train."""
        if self.kind == "class":
            values = self._known(rows, self._only_name())
            found = sorted(values.texts) if isinstance(values, Words) else [as_text(n) for n in sorted(set(values.tolist()))]
            self.classes = found
        elif self.kind == "labels":
            self.classes = list(self.names) if self.separator is None else self._labels_found(rows)
        else:
            self._numbers(rows)
            scales = [mean_and_std(values) for values in self._numbers(train).T]
            self.units = Units(*map(torch.tensor, zip(*scales, strict=True)))

    def read_known(self, rows: Cells, own: Splits) -> torch.Tensor:
        """Return the targets of rows by the classes, or the mean and deviation, of a run's own data. Raises UserError."""
        self.units, self.classes = own.units, None if own.names is None else list(own.names)
        if self.kind == "values" and (own.units is None or len(own.units.mean) != len(self.names)):
            raise UserError(f"{self.setting}={list(self.names)}: the run does not predict so many numbers")
        if self.kind == "labels" and self.separator is None and self.classes not in (None, list(self.names)):
            raise UserError(f"{self.setting}={list(self.names)}: the run's labels are {named(self.classes or ())}")
        if self.kind != "values" and self.classes is None:
            self.learn(rows, rows)
        return self.read(rows)

    def read(self, rows: Cells) -> torch.Tensor:
        """Return the targets of rows: class numbers (n,) int64, labels (n, k) of 0 and 1, or standardised values (n, k)."""
        if self.kind == "class":
            return self._class_numbers(rows)
        if self.kind == "labels":
            return self._marked(rows) if self.separator is None else self._split_labels(rows)
        assert self.units is not None
        return (torch.from_numpy(self._numbers(rows)).float() - self.units.mean) / self.units.std

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

    def _known(self, rows: Cells, name: str) -> np.ndarray | Words:
        values = rows.columns[name]
        if (empty := absent(values)).any():
            raise DataError(
                f"{rows.place(int(empty.argmax()))} has no value in the target column {name}, and {int(empty.sum())} of "
                f"{len(empty):,} rows have none: remove them (data.na says which words are no value)"
            )
        return values

    def _class_numbers(self, rows: Cells) -> torch.Tensor:

        assert self.classes is not None
        numbers = {name: number for number, name in enumerate(self.classes)}
        words = words_of(self._known(rows, self._only_name()), self.classes)
        if unknown := [text for n, text in enumerate(words.texts) if text not in numbers and (words.codes == n).any()]:
            hint = ": if it is a number to predict, set task=regression" if all(map(_is_number, unknown)) else ""
            row = rows.place(int((words.codes == words.texts.index(unknown[0])).argmax()))
            raise DataError(f"{row}: no training row has the class {named(unknown, 5)} of {self.names[0]}{hint}")
        return torch.from_numpy(np.array([numbers.get(text, 0) for text in words.texts])[words.codes])

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

    def _marked(self, rows: Cells) -> torch.Tensor:
        values = self._numbers(rows)
        if ((values != 0) & (values != 1)).any():
            raise DataError(f"{rows.source}: columns of labels hold 0 and 1, and {', '.join(self.names)} hold other numbers")
        return torch.from_numpy(values).float()

    def _labels_found(self, rows: Cells) -> list[str]:
        return sorted({label for labels in self._split(rows)[0] for label in labels})

    def _split(self, rows: Cells) -> tuple[list[list[str]], np.ndarray]:
        """Return the labels in each word, and each row's word; a row without any is one that has none: its number is -1."""
        words = words_of(rows.columns[self._only_name()])
        return [[part.strip() for part in text.split(self.separator) if part.strip()] for text in words.texts], words.codes

    def _split_labels(self, rows: Cells) -> torch.Tensor:
        assert self.classes is not None
        numbers = {name: number for number, name in enumerate(self.classes)}
        labels, codes = self._split(rows)
        if unknown := sorted({label for of_word in labels for label in of_word} - set(numbers)):
            raise DataError(f"{rows.source}: no training row has the label {named(unknown, 5)}")
        target = torch.zeros(len(labels) + 1, len(numbers))  # the last one is of rows without a word
        for n, of_word in enumerate(labels):
            target[n, [numbers[label] for label in of_word]] = 1.0
        return target[torch.from_numpy(codes).long()]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

"""Predictions for a stream of inputs, as a table: in order, in bounded memory, with a row for each input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drivetrain.inference.inputs import Item, Read, grouped, read_in_batches
from drivetrain.inference.loaded import LoadedRun
from drivetrain.inference.tables import Output

Place = tuple[int, int]  # id of a read, and the number of one of its samples
Row = dict[str, Any]


class Predictor(Protocol):
    """The predictions of a model for the inputs of a batch, as columns of their rows."""

    @property
    def columns(self) -> Sequence[str]: ...
    def __call__(self, batch: Sequence[Read]) -> Iterator[tuple[Place, Row]]:
        """Yield the columns of each input that could be read; one that cannot be predicted becomes an error of its read."""


@dataclass
class Outputs:
    """Labels and probabilities, or numbers."""

    loaded: LoadedRun

    @property
    def columns(self) -> Sequence[str]:
        """The columns of a prediction: those that a batch of zeros gets."""
        return list(next(self.loaded.predict_ready(self.loaded.example()).rows()))

    def __call__(self, batch: Sequence[Read]) -> Iterator[tuple[Place, Row]]:
        for places, x in grouped(batch):
            predicted = self.loaded.predict_ready(self.loaded.transforms(x)).rows()
            yield from (((id(read), n), row) for (read, n), row in zip(places, predicted, strict=True))


@dataclass
class Counts:
    """The numbers of inputs that were predicted, and of those that could not be read."""

    predicted: int = 0
    unreadable: int = 0
    first_error: str = ""


def predict_all(
    loaded: LoadedRun, predictor: Predictor, items: Iterator[Item], size: int, output: Output, show: Callable[[int], None],
    with_targets: bool = False,
) -> Counts:  # fmt: skip
    """Predict the items, about `size` at a time, and write a row for each; `show` is called with the number of rows so far."""
    counts = Counts()
    columns = predictor.columns
    for batch in read_in_batches(items, size):
        predicted = dict(predictor(batch))
        rows = [
            _row(read, n, columns, loaded, with_targets, predicted.get((id(read), n), {}))
            for read in batch for n in range(len(read.item.names))
        ]  # fmt: skip
        output.write(rows)
        errors = [read.errors[n] for read in batch for n in sorted(read.errors)]
        counts.predicted += len(rows) - len(errors)
        counts.unreadable += len(errors)
        counts.first_error = counts.first_error or (errors[0] if errors else "")
        show(counts.predicted)
    return counts


def _row(read: Read, n: int, columns: Sequence[str], loaded: LoadedRun, with_targets: bool, predicted: Row) -> Row:
    """The row of an item's sample. All rows have the same columns."""
    target = {"target": loaded.name_target(read.item.targets(n) if read.item.targets else None)} if with_targets else {}
    return {"input": read.item.names[n], **dict.fromkeys(columns), **target, **predicted, "error": read.errors.get(n)}

"""Predictions for a stream of inputs, as a table: in order, in bounded memory, with a row for each input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from drivetrain.inference.inputs import Item, Read, read_in_batches
from drivetrain.inference.loaded import LoadedRun
from drivetrain.inference.tables import Output


@dataclass
class Counts:
    """How many inputs were predicted, and how many could not be read."""

    predicted: int = 0
    unreadable: int = 0
    first_error: str = ""


def predict_all(
    loaded: LoadedRun, items: Iterator[Item], size: int, output: Output, show: Callable[[int], None], with_targets: bool = False
) -> Counts:
    """Predict the items, `size` at a time, and write a row for each; `show` is called with the number of rows so far."""
    counts = Counts()
    columns = _columns(loaded)
    for batch in read_in_batches(items, size):
        rows = [_row(read, columns, loaded, with_targets) for read in batch]
        for group in loaded.transforms.groups((n, read.x) for n, read in enumerate(batch) if read.x is not None):
            x = loaded.transforms(loaded.transforms.stack([x for _, x in group]))
            for (n, _), found in zip(group, loaded.predict_ready(x).rows(), strict=True):
                rows[n].update(found)
        output.write(rows)
        errors = [read.error for read in batch if read.error]
        counts.predicted += len(batch) - len(errors)
        counts.unreadable += len(errors)
        counts.first_error = counts.first_error or (errors[0] if errors else "")
        show(counts.predicted + counts.unreadable)
    return counts


def _columns(loaded: LoadedRun) -> list[str]:
    """The columns of a prediction: those that a batch of zeros gets."""
    return list(next(loaded.predict_ready(loaded.example()).rows()))


def _row(read: Read, columns: list[str], loaded: LoadedRun, with_targets: bool) -> dict[str, Any]:
    """A row without its prediction. All rows have the same columns."""
    target = {"target": loaded.name_target(read.target)} if with_targets else {}
    return {"input": read.name, **dict.fromkeys(columns), **target, "error": read.error or None}

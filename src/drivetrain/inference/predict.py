"""Predictions for a stream of inputs, as a table: in order, in bounded memory, with a row for each input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from drivetrain.inference.inputs import Item, Read, grouped, read_in_batches
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
    """Predict the items, about `size` at a time, and write a row for each; `show` is called with the number of rows so far."""
    counts = Counts()
    columns = _columns(loaded)
    for batch in read_in_batches(items, size):
        rows = {
            (id(read), n): _row(read, n, columns, loaded, with_targets) for read in batch for n in range(len(read.item.names))
        }
        for places, x in grouped(batch):
            for (read, n), found in zip(places, loaded.predict_ready(loaded.transforms(x)).rows(), strict=True):
                rows[id(read), n].update(found)
        output.write(list(rows.values()))
        errors = [read.errors[n] for read in batch for n in sorted(read.errors)]
        counts.predicted += len(rows) - len(errors)
        counts.unreadable += len(errors)
        counts.first_error = counts.first_error or (errors[0] if errors else "")
        show(counts.predicted + counts.unreadable)
    return counts


def _columns(loaded: LoadedRun) -> list[str]:
    """The columns of a prediction: those that a batch of zeros gets."""
    return list(next(loaded.predict_ready(loaded.example()).rows()))


def _row(read: Read, n: int, columns: list[str], loaded: LoadedRun, with_targets: bool) -> dict[str, Any]:
    """The row of an item's sample, without its prediction. All rows have the same columns."""
    target = {"target": loaded.name_target(read.item.targets(n) if read.item.targets else None)} if with_targets else {}
    return {"input": read.item.names[n], **dict.fromkeys(columns), **target, "error": read.errors.get(n)}

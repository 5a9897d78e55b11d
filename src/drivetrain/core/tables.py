"""What the tables of an evaluation say, in few lines: a confusion matrix, and the figures of each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MOST_ROWS = 12  # a table of more is shown by the rows that say the most


class Shown(NamedTuple):
    """A table as text."""

    title: str
    header: list[str]
    rows: list[list[str]]


def of_result(tables: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """Return what the tables that are shown are of, and these: of the test set, on the best checkpoint or the last weights."""
    name = "test" if tables.get("test") else "validation"
    evaluations = tables.get(name, {})
    if "best" in evaluations:
        return f"{name} set, best checkpoint", evaluations["best"]
    return f"{name} set", evaluations.get("final", {})


def is_confusion(table: Mapping[str, object]) -> bool:
    """Whether a table counts how many of a class (a row) are predicted to be of each class (a column)."""
    return bool(table["rows"] == table["columns"])


def shown(name: str, table: Mapping[str, Any], most: int = MOST_ROWS) -> Shown:
    """Return a table as text, of at most `most` rows."""
    title, rows, values = name.replace("_", " "), table["rows"], table["values"]
    if is_confusion(table):
        if len(rows) > most:
            return _confused(title, rows, values, most)
        return Shown(f"{title} (row: the class, column: predicted)", ["", *rows], _as_text(rows, values))
    if len(rows) <= most:
        return Shown(title, ["", *table["columns"]], _as_text(rows, values))
    key = table["columns"].index("f1") if "f1" in table["columns"] else 0
    worst = sorted(range(len(rows)), key=lambda n: values[n][key])[:most]
    title += f": {most} of {len(rows)} classes, the worst by {table['columns'][key]}"
    return Shown(title, ["", *table["columns"]], _as_text([rows[n] for n in worst], [values[n] for n in worst]))


def _confused(title: str, rows: Sequence[str], values: Sequence[Sequence[int]], most: int) -> Shown:
    """Return the pairs of classes that are confused the most."""
    pairs = [(count, row, column) for row, line in enumerate(values) for column, count in enumerate(line) if row != column]
    found = [(count, row, column) for count, row, column in sorted(pairs, key=lambda pair: -pair[0])[:most] if count]
    text = [[rows[row], rows[column], f"{count:,}", f"{count / sum(values[row]):.1%}"] for count, row, column in found]
    return Shown(f"{title}: what is confused the most", ["class", "predicted as", "times", "of the class"], text)


def _as_text(names: Sequence[str], values: Sequence[Sequence[float]]) -> list[list[str]]:
    cells = [[f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for value in line] for line in values]
    return [[name, *line] for name, line in zip(names, cells, strict=True)]

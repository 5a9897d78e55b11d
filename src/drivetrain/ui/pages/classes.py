"""Confusion matrices and tables of classes on a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.ui import table_picture
from drivetrain.ui.sheet import Cell, Drawn, Part, Section, Table, remarks, under

MOST_CLASSES = 30  # of a matrix that is shown whole; of a larger one, what is confused the most
ROWS = 40  # of a table of classes
SHARES = ("precision", "recall", "f1", "iou")  # columns that get a bar


def sections(found: Mapping[str, Mapping[str, Any]], of: str, level: int = 2) -> list[Section]:
    """A section for each table of an evaluation; `of` says what it is of."""
    body: list[Section] = []
    for name, values in found.items():
        title = f"{name.replace('_', ' ').capitalize()}, {of}"
        if table_picture.is_confusion(values) and len(values["rows"]) <= MOST_CLASSES:
            how = remarks("A row is a class, a column what it was predicted as. The darker, the larger the share.")
            body += under(title, how, matrix(values, title), level=level)
        else:
            shown = table_picture.shown(name, values, MOST_CLASSES if table_picture.is_confusion(values) else ROWS)
            told = [remarks(shown.title)] if shown.title.replace("_", " ") != name.replace("_", " ") else []
            table = Table(["class", *shown.header[1:]], shown.rows, title, sortable=True, bars=_bars(shown))
            body += under(title, *told, table, level=level)
    return body


def matrix(values: Mapping[str, Any], title: str) -> Part:
    """A confusion matrix; a cell's ground is as dark as its share of the class."""
    names = [str(name) for name in values["rows"]]
    rows: list[list[Cell]] = []
    for name, counts in zip(names, values["values"], strict=True):
        whole = max(sum(counts), 1)
        rows.append([name, *(Drawn(str(count or ""), share=count / whole) for count in counts)])
    found = Table(["class", *names], rows, f"{title}: how many")
    return Part(f'<div class="confusion">{found.html}</div>')


def _bars(shown: table_picture.Shown) -> dict[str, list[float | None]]:
    """The values of the columns that are shares."""
    columns = {n: name for n, name in enumerate(shown.header) if name in SHARES}
    return {name: [float(row[n]) for row in shown.rows] for n, name in columns.items()}

"""The confusion matrices and the tables of classes of runs, on the report's page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.core import tables
from drivetrain.measure.html import plot, table
from drivetrain.run.reader import RunFiles

MOST_RUNS = 6  # the tables of more are in their result.json
MOST_CELLS = 30  # classes of a matrix whose cells are large enough for a number
ROWS = 40  # of a table of classes
SHARES = ("precision", "recall", "f1", "iou")  # columns that are drawn


def sections(runs: Sequence[RunFiles], numbers: dict[int, str]) -> tuple[list[str], dict[str, Any]]:
    """The page's sections on the tables of these runs, and the figures in them by id."""
    body: list[str] = []
    figures: dict[str, Any] = {}
    for run in [run for run in runs if run.result and run.result.tables][:MOST_RUNS]:
        assert run.result is not None
        of_what, found = tables.of_result(run.result.tables)
        of = f"run {numbers[id(run)]}, {of_what}"
        for name, values in found.items():
            body.append(f"<h2>{html.escape(name.replace('_', ' ').capitalize())}, {of}</h2>")
            if tables.is_confusion(values):
                key = f"{name}{numbers[id(run)]}"
                figures[key] = heatmap(values)
                body += ['<p class="soft">Colour: the share of the class. Number: how many.</p>']
                body.append(plot(key, 130 + min(26 * len(values["rows"]), 700)))
            else:
                if len(values["rows"]) <= ROWS and set(SHARES) & set(values["columns"]):
                    key = f"{name}{numbers[id(run)]}"
                    figures[key] = bars(values)
                    body.append(plot(key, 260))
                shown = tables.shown(name, values, ROWS)
                body.append(table(shown.header, shown.rows, sortable=True))
    return body, figures


def bars(values: Mapping[str, Any]) -> dict[str, Any]:
    """The shares of each class, such as its precision and recall, side by side as a Plotly figure."""
    shares = [n for n, name in enumerate(values["columns"]) if name in SHARES]
    drawn = [
        {"type": "bar", "name": values["columns"][n], "x": values["rows"], "y": [row[n] for row in values["values"]]}
        for n in shares
    ]
    layout = {"margin": {"t": 10, "r": 10}, "xaxis": {"type": "category"}, "yaxis": {"range": [0, 1]}, "barmode": "group"}
    return {"data": drawn, "layout": layout}


def heatmap(values: Mapping[str, Any]) -> dict[str, Any]:
    """A confusion matrix as a Plotly figure; the first class is at the top left."""
    names, counts = values["rows"], values["values"]
    shares = [[count / max(sum(row), 1) for count in row] for row in counts]
    drawn: dict[str, Any] = {
        "type": "heatmap", "x": names, "y": names, "z": shares, "customdata": counts, "zmin": 0, "zmax": 1,
        "colorscale": [[0, "rgba(62,99,221,0)"], [1, "#3e63dd"]], "xgap": 1, "ygap": 1,
        "hovertemplate": "%{y}, predicted as %{x}: %{customdata} (%{z:.1%})<extra></extra>",
    }  # fmt: skip
    if len(names) <= MOST_CELLS:
        drawn |= {"text": [[str(count or "") for count in row] for row in counts], "texttemplate": "%{text}"}
    axis = {"type": "category", "showgrid": False}
    return {
        "data": [drawn],
        "layout": {
            "margin": {"t": 10, "r": 10},
            "xaxis": {**axis, "title": {"text": "predicted"}},
            "yaxis": {**axis, "title": {"text": "class"}, "autorange": "reversed"},
        },
    }

"""Curves over the updates of a run: drawn in a terminal by plotext, or as a PNG by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain.core.errors import UserError
from drivetrain.core.machine import files
from drivetrain.core.options.horizon import Horizon
from drivetrain.core.typed import JsonMapping
from drivetrain.ui.output import writing
from drivetrain.ui.sheet import Table

if TYPE_CHECKING:
    from PIL import ImageDraw

LABEL_WIDTH = 8  # characters of the labels left of a panel
LINES = 16, 10  # lines of the first panel and of each further one, with its axes


class Curve(NamedTuple):
    """The curve of one panel: `points` are (update, value)."""

    name: str
    points: list[tuple[int, float]]
    low: float  # of the vertical axis
    high: float


def text(curves: list[Curve], over: Horizon, width: int = 80) -> str:
    """The curves as lines of text, one panel below the other, with updates at the bottom and epochs at the top."""
    panels = [_panel(curve, over, width, first=number == 0) for number, curve in enumerate(curves)]
    return "\n".join(panels)


def _panel(curve: Curve, over: Horizon, width: int, first: bool) -> str:
    """One curve in a frame with labelled axes; `first` is the tall panel."""
    import plotext

    plotext.clear_figure()
    plotext.limit_size(False, False)  # the caller knows the width; a pipe has none
    plotext.plot_size(width, LINES[0] if first else LINES[1])
    plotext.theme("clear")  # no colours, so that a pipe gets the same text
    plotext.scatter([0], [curve.low], marker=" ", xside="upper")  # an axis without data would not be drawn
    plotext.plot(*map(list, zip(*curve.points, strict=True)), marker="braille")
    epochs = epoch_marks(over)
    updates = whole_ticks(over.updates)
    for side, at, labels in (("lower", updates, updates), ("upper", *zip(*epochs, strict=True))):
        plotext.xlim(0, over.updates, xside=side)
        plotext.xticks(list(at), [f"{label:,}" for label in labels], xside=side)
    values = [curve.low, (curve.low + curve.high) / 2, curve.high]
    plotext.ylim(curve.low, curve.high)
    plotext.yticks(values, [f"{value:.3g}".rjust(LABEL_WIDTH) for value in values])
    plotext.xlabel("epoch", xside="upper")
    plotext.xlabel("update", xside="lower")
    plotext.ylabel(curve.name)
    drawn: str = plotext.uncolorize(plotext.build())
    return "\n".join(line.rstrip() for line in drawn.splitlines())


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from `low` to `high`, at most about `most` of them."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(f for f in (1, 2, 5, 10, 20) if (high - low) / (step * f) <= most)
    first = math.ceil(low / step - 1e-9)
    found = [(first + n) * step for n in range(most + 2)]
    return [value for value in found if value <= high + 1e-9 * (high - low)]


def whole_ticks(end: float) -> list[int]:
    """Round whole numbers from 0 to `end`."""
    return [round(value) for value in ticks(0, end, 8) if abs(value - round(value)) < 1e-9]


def epoch_marks(over: Horizon) -> list[tuple[int, int]]:
    """(updates made, epochs made) for round numbers of epochs."""
    return [(over.ends[epoch - 1] if epoch else 0, epoch) for epoch in whole_ticks(over.epochs)]


def png(curves: list[Curve], over: Horizon, title: str, file: Path) -> None:
    """Write the same curves as an image. Raises UserError without matplotlib or if the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--png needs the package 'matplotlib', which is not installed: pip install 'drivetrain[plots]'") from None

    figure = Figure(figsize=(8, 2.2 + 1.8 * len(curves)), layout="constrained")
    panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False, height_ratios=[2, *[1] * (len(curves) - 1)])[:, 0]
    for axes, curve in zip(panels, curves, strict=True):
        axes.plot(*zip(*curve.points, strict=True), color="tab:blue", linewidth=1.8)
        space = 0.04 * (curve.high - curve.low)
        axes.set(ylabel=curve.name, ylim=(curve.low - space, curve.high + space), xlim=(0, over.updates))
        axes.grid(alpha=0.3)
        axes.spines[["right", "top"]].set_visible(False)
    panels[-1].set_xlabel("update")
    epochs = panels[0].secondary_xaxis("top")
    epochs.set_xlabel("epoch")
    epochs.set_xticks(*zip(*epoch_marks(over), strict=True))
    figure.suptitle(title, fontsize=10)
    with writing(f"--png {file}"):
        figure.savefig(file, format="png", dpi=150)


SIDE = 900  # pixels for all cells of a large matrix
CELL = (4, 44)  # pixels of a cell, at least and at most
NUMBERED = 20  # pixels of a cell with room for a number and a name
COLOR = (62, 99, 221)
INK = (28, 32, 36)


def draw(table: JsonMapping, path: Path) -> Path:
    """Draw a confusion matrix: colours are shares of the class (a row), numbers are counts. Returns `path`."""
    from PIL import Image, ImageDraw, ImageFont

    names, counts = table["rows"], table["values"]
    cell = min(CELL[1], max(CELL[0], SIDE // len(names)))
    font = ImageFont.load_default(11)
    named = cell >= NUMBERED
    margin = 24 + (min(160, max(int(font.getlength(name)) for name in names)) if named else 0)
    side = margin + cell * len(names) + 8
    sheet = Image.new("RGB", (side, side), "white")
    pen = ImageDraw.Draw(sheet)
    for row, line in enumerate(counts):
        for column, count in enumerate(line):
            left, top = margin + column * cell, margin + row * cell
            share = count / max(sum(line), 1)
            shade = tuple(round(255 + (c - 255) * share) for c in COLOR)
            pen.rectangle((left, top, left + cell - 1, top + cell - 1), fill=shade, outline=(217, 217, 224) if named else None)
            if named and count:
                text = f"{count}" if count < 10_000 else f"{count / 1000:.0f}k"
                pen.text((left + cell / 2, top + cell / 2), text, "white" if share > 0.5 else INK, font, "mm")
    if named:
        _names(pen, sheet, names, margin, cell, font)
    pen.text((margin + cell * len(names) / 2, 10), "predicted", INK, font, "mm")
    _turned(sheet, "class", (4, margin + cell * len(names) // 2), font)
    sheet.save(files.place_for(path))
    return path


def _names(pen: ImageDraw.ImageDraw, sheet: Any, names: list[str], margin: int, cell: int, font: Any) -> None:
    for n, name in enumerate(names):
        middle = margin + n * cell + cell // 2
        pen.text((margin - 4, middle), name, INK, font, "rm")
        _turned(sheet, name, (middle - 7, margin - 4), font)


def _turned(sheet: Any, text: str, place: tuple[int, int], font: Any) -> None:
    """Write a text from bottom to top; `place` is the left end of its lines and its start."""
    from PIL import Image, ImageDraw

    strip = Image.new("RGB", (int(font.getlength(text)) + 1, 14), "white")
    ImageDraw.Draw(strip).text((0, 0), text, INK, font)
    turned = strip.rotate(90, expand=True)
    sheet.paste(turned, (place[0], max(0, place[1] - turned.height)))


MOST_ROWS = 12  # a longer table shows only its most informative rows


def of_result(tables: Mapping[str, JsonMapping]) -> tuple[str, JsonMapping]:
    """Return a title and the tables to show: of the test set, on the best checkpoint or the last weights."""
    name = "test" if tables.get("test") else "validation"
    evaluations = tables.get(name, {})
    if "best" in evaluations:
        return f"{name} set, best checkpoint", evaluations["best"]
    return f"{name} set", evaluations.get("final", {})


def is_confusion(table: Mapping[str, object]) -> bool:
    """True if a table counts the predictions of each class (columns) for each true class (rows)."""
    return bool(table["rows"] == table["columns"])


def shown(name: str, table: JsonMapping, most: int = MOST_ROWS) -> Table:
    """Return a table as text, of at most `most` rows."""
    title, rows, values, header = name.replace("_", " "), table["rows"], table["values"], ["", *table["columns"]]
    if is_confusion(table):
        if len(rows) > most:
            return _confused(title, rows, values, most)
        return Table(header, _as_text(rows, values), f"{title} (row: the class, column: predicted)")
    if len(rows) <= most:
        return Table(header, _as_text(rows, values), title)
    key = table["columns"].index("f1") if "f1" in table["columns"] else 0
    worst = sorted(range(len(rows)), key=lambda n: values[n][key])[:most]
    title += f": {most} of {len(rows)} classes, the worst by {table['columns'][key]}"
    return Table(header, _as_text([rows[n] for n in worst], [values[n] for n in worst]), title)


def _confused(title: str, rows: Sequence[str], values: Sequence[Sequence[int]], most: int) -> Table:
    """Return the most frequently confused pairs of classes."""
    pairs = [(count, row, column) for row, line in enumerate(values) for column, count in enumerate(line) if row != column]
    found = [(count, row, column) for count, row, column in sorted(pairs, key=lambda pair: -pair[0])[:most] if count]
    text = [[rows[row], rows[column], f"{count:,}", f"{count / sum(values[row]):.1%}"] for count, row, column in found]
    return Table(["class", "predicted as", "times", "of the class"], text, f"{title}: the most frequent confusions")


def _as_text(names: Sequence[str], values: Sequence[Sequence[float]]) -> list[list[str]]:
    return [
        [name, *(f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for value in line)]
        for name, line in zip(names, values, strict=True)
    ]

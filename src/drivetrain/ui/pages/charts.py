"""Charts as SVG: curves, dots and marks on linear or logarithmic axes, each with a text alternative."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.core.typed import JsonMapping
from drivetrain.ui import plots
from drivetrain.ui.sheet import Cell, Drawn, PagePart, Section, Table, breakable, escape, remarks, under

if TYPE_CHECKING:
    import numpy as np

WIDTH, HEIGHT = 340, 190  # of a chart in its own units, close to displayed pixels
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 34  # margins around the curves
MAX_POINTS = 160  # of a curve
COLOURS, DASHES = 8, 4
NAMED = 16  # curves that the key below a chart names
WHOLE = ("updates", "samples", "round")  # counts: their axes have whole numbers only
SMALLEST, LARGEST = 1e-100, 1e100  # smaller values are shown as 0


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart: its name, and (x, y) in ascending order of x. A faint line is behind the others and not in the key."""

    name: str
    points: Sequence[tuple[float, float]]
    faint: bool = False


@dataclass(frozen=True)
class Axis:
    """A range of values, and its position in a chart."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The place of a value on the axis."""
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def data(self) -> str:
        """The axis as JSON, from which the page's script converts a position to a value."""
        return escape(json.dumps([self.low, self.high, self.start, self.end, int(self.log)]))


def curves(
    title: str, given: Sequence[ChartLine], x: str = "updates", log: bool = False, log_x: bool = False, kind: str = "",
    dots: int = 0, zero: bool = False, marks: Sequence[tuple[str, float]] = (), names: Sequence[str] = (), keyed: bool = True,
) -> str:  # fmt: skip
    """A chart of curves over `x`, the first `dots` of them as dots; "" without any point. `keyed` adds a key below.

    `log` axes leave out values of 0 and below. `zero` begins the vertical axis at 0. `marks` are named vertical lines.
    `kind` is the figure's CSS class. With `names`, values along `x` are indices into them.
    """
    given = sorted(given, key=lambda curve: curve.faint)
    drawable = [(n, curve.name, _drawable(curve.points, log, log_x)) for n, curve in enumerate(given)]
    faint = {n for n, curve in enumerate(given) if curve.faint}
    shown = [(n, name, points if n < dots else _thinned(points)) for n, name, points in drawable if points]
    if not shown:
        return ""
    xs = [p[0] for _, _, points in shown for p in points] + [value for _, value in marks if value > 0 or not log_x]
    ys = [p[1] for _, _, points in shown for p in points] + ([0.0] if zero and not log else [])
    xs += [-0.5, len(names) - 0.5] if names else []
    along, up = _axis(xs, LEFT, WIDTH - RIGHT, log_x), _axis(ys, HEIGHT - BOTTOM, TOP, log, room=0.04)
    drawn = [_grid(along, up, x, names)]
    for number, (_, value) in enumerate(marks, len(given)):
        at, style = along.at(value), _style(number)
        drawn.append(f'<line class="{style} d2" stroke-width="2" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for number, name, points in sorted(shown, key=lambda each: each[0] not in faint):
        places, style = [(along.at(a), up.at(b)) for a, b in points], "faint" if number in faint else _style(number)
        if number >= dots:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
            drawn.append(f'<polyline class="curve {style}" data-name="{escape(name)}" points="{path}"/>')
        if number < dots or len(places) == 1:
            drawn += [f'<circle class="dot {style}" cx="{a:.1f}" cy="{b:.1f}" r="3.5"/>' for a, b in places]
    said = escape(f"{title} over {x}: " + "; ".join(_in_words(name, points) for _, name, points in shown[:NAMED]))
    numbered = [(n, name) for n, name, _ in shown if n not in faint] + list(enumerate((name for name, _ in marks), len(given)))
    below = key(numbered) if keyed and 1 < len(numbered) <= NAMED else ""
    return (
        f'<figure class="{kind}"><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{said}" data-x="{along.data()}" data-y="{up.data()}">{"".join(drawn)}</svg>{below}</figure>'
    )


def grid(charts: Sequence[str]) -> str:
    """Charts in rows that fill the page's width; "" without any chart."""
    found = [chart for chart in charts if chart]
    return f'<div class="charts">{"".join(found)}</div>' if found else ""


def spans_decades(values: Sequence[float], least: float = 10.0) -> bool:
    """True if values need a logarithmic axis: all are above 0, and the largest is `least` times the smallest."""
    return bool(values) and min(values) > 0 and max(values) >= least * min(values)


def short(value: float) -> str:
    """A number on an axis, in few characters."""
    if value and not 1e-3 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:.3g}".partition("e") if "e" in f"{value:.3g}" else f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent or 0)}"
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.4g}"


def _style(number: int) -> str:
    dash = number // COLOURS % DASHES
    return f"s{number % COLOURS}" + (f" d{dash}" if dash else "")


def _drawable(points: Sequence[tuple[float, float]], log: bool, log_x: bool) -> list[tuple[float, float]]:
    """The points that the axes can show: values of a damaged file may fit on none."""
    rounded = [tuple(0.0 if abs(v) < SMALLEST else v for v in point) for point in points if all(abs(v) < LARGEST for v in point)]
    return [(x, y) for x, y in rounded if (y > 0 or not log) and (x > 0 or not log_x)]


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    every = -(-len(points) // MAX_POINTS)
    return points if every <= 1 else [*points[::every], points[-1]]


def _axis(values: Sequence[float], start: float, end: float, log: bool, room: float = 0.0) -> Axis:
    """An axis for these values, with some `room` at its ends."""
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        low, high = (low / 2, high * 2) if log else (low - (abs(low) / 2 or 1), high + (abs(high) / 2 or 1))
    if log:
        more = (high / low) ** room
        return Axis(low / more, high * more, start, end, True)
    more = (high - low) * room
    return Axis(low - more if low else low, high + more, start, end)


def ticks(axis: Axis, most: int = 5) -> list[float]:
    """Round values on an axis, at most about `most`."""
    if axis.log:
        first, last = math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high))
        factors = (1, 2, 5) if last - first <= 3 else (1,)
        every = max(1, -(-(last - first) // most))
        found = [f * 10.0**n for n in range(first, last + 1, every) for f in factors]
        inside = [value for value in found if axis.low <= value <= axis.high]
        if len(inside) > 1:
            return inside if len(inside) <= most + 2 else inside[:: -(-len(inside) // most)]
    return plots.ticks(axis.low, axis.high, most)


def _grid(along: Axis, up: Axis, x: str, names: Sequence[str] = ()) -> str:
    """The grid lines with their numbers, and the name of the horizontal axis."""
    floor, drawn = HEIGHT - BOTTOM, []
    for value in ticks(up):
        y = up.at(value)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    room = (WIDTH - LEFT) // (7 * len(names)) if names else 0  # characters
    said = {tick: short(tick) for tick in ticks(along) if x not in WHOLE or abs(tick - round(tick)) < 1e-9}
    if names:
        said = {n: name if len(name) <= room else f"{name[: room - 1]}…" for n, name in enumerate(names)}
    for value, text in said.items():
        at = along.at(value)
        drawn.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{floor}" y2="{floor + 4}"/>')
        drawn.append(f'<text x="{at:.1f}" y="{floor + 16}" text-anchor="middle">{escape(text)}</text>')
    name = f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x)}</text>'
    return "".join([*drawn, name])


def _in_words(name: str, points: Sequence[tuple[float, float]]) -> str:
    (first_x, first), (last_x, last) = points[0], points[-1]
    values = [y for _, y in points]
    return (
        f"{name} from {short(first)} at {short(first_x)} to {short(last)} at {short(last_x)}, "
        f"between {short(min(values))} and {short(max(values))}"
    )


def key(numbered: Sequence[tuple[int, str]]) -> str:
    """The key: names of curves with their colours, by their numbers in the chart."""
    lines = "".join(
        f'<li><svg viewBox="0 0 22 10" aria-hidden="true"><path class="{_style(n)}" stroke-width="3" d="M0 5H22"/></svg>'
        f"{escape(name)}</li>"
        for n, name in numbered
    )
    return f'<ul class="key">{lines}</ul>'


MOST_CLASSES = 30  # of a matrix that is shown whole; a larger one shows the classes confused most
ROWS = 40  # of a table of classes
SHARES = ("precision", "recall", "f1", "iou")  # columns that get a bar


def sections(found: Mapping[str, JsonMapping], of: str, level: int = 2) -> list[Section]:
    """A section for each table of an evaluation; `of` names its set."""
    body: list[Section] = []
    for name, values in found.items():
        title = f"{name.replace('_', ' ').capitalize()}, {of}"
        if plots.is_confusion(values) and len(values["rows"]) <= MOST_CLASSES:
            how = remarks("Rows are classes, columns predictions. Darker cells have a larger share of the class.")
            body += under(title, how, matrix(values, title), level=level)
        else:
            shown = plots.shown(name, values, MOST_CLASSES if plots.is_confusion(values) else ROWS)
            told = [remarks(shown.name)] if shown.name.replace("_", " ") != name.replace("_", " ") else []
            shares = {of: [float(str(row[n])) for row in shown.rows] for n, of in enumerate(shown.header) if of in SHARES}
            table = Table(["class", *shown.header[1:]], shown.rows, title, sortable=True, bars=shares)
            body += under(title, *told, table, level=level)
    return body


def matrix(values: JsonMapping, title: str) -> PagePart:
    """A confusion matrix; a cell's background darkens with its share of the class."""
    names = [str(name) for name in values["rows"]]
    rows: list[list[Cell]] = []
    for name, counts in zip(names, values["values"], strict=True):
        whole = max(sum(counts), 1)
        rows.append([name, *(Drawn(str(count or ""), share=count / whole) for count in counts)])
    found = Table(["class", *names], rows, f"{title}: how many")
    return PagePart(f'<div class="confusion">{found.html}</div>')


SIDE = 96  # pixels of a tile at most


def tile(pixels: np.ndarray, name: str, target: str, prediction: str, kind: str) -> str:
    """A picture (h, w, 3), uint8, with its target and prediction. `kind`: right, wrong or "" if neither."""
    mark = {"right": "✓ ", "wrong": "✗ ", "": ""}[kind]
    is_ = f"{escape(target)}<br>" if target else ""
    said = escape(f"{name}: {target}, predicted {prediction}")
    return (
        f'<li><img alt="{said}" src="data:image/png;base64,{base64.b64encode(_png(pixels)).decode()}">'
        f'{is_}<span class="{kind}">{mark}{escape(prediction)}</span><br><span class="soft">{breakable(name)}</span></li>'
    )


def tiles(drawn: Sequence[str]) -> PagePart:
    """Tiles side by side."""
    return PagePart(f'<ul class="tiles">{"".join(drawn)}</ul>')


def _png(picture: np.ndarray) -> bytes:
    """Pixels (h, w, 3), uint8, as a PNG file of at most SIDE pixels a side."""
    from PIL import Image

    image, file = Image.fromarray(picture), io.BytesIO()
    if max(image.size) > SIDE:
        image.thumbnail((SIDE, SIDE), Image.Resampling.BOX)  # each pixel is the mean of the pixels it replaces
    image.save(file, "PNG")
    return file.getvalue()

"""Curves over the updates of a run: drawn in a terminal with Braille dots, or as a PNG by matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from drivetrain.core.errors import UserError
from drivetrain.core.horizon import Horizon

# Unicode's Braille: the bit of each dot of a character, by row and column. Terminals of any kind show it, and no library
# for it has kept its interface over the years.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
MARGIN = 10  # characters left of the frame, for the values


class Curve(NamedTuple):
    """What one panel shows: `points` are (update, value)."""

    name: str
    points: list[tuple[int, float]]
    low: float  # of the vertical axis
    high: float


def text(curves: list[Curve], over: Horizon, width: int = 80) -> str:
    """The curves below one another; updates along the bottom, epochs along the top."""
    columns = max(20, width - MARGIN - 2)
    epochs = epoch_marks(over)
    updates = [(u, u) for u in ticks(over.updates)]
    lines = [_labels("epoch", epochs, over.updates, columns), _border("┌┴┐", epochs, over.updates, columns)]
    for number, curve in enumerate(curves):
        if number:
            lines.append(_border("├─┤", [], over.updates, columns))
        lines += _panel(curve, over.updates, columns, rows=12 if number == 0 else 6)
    lines += [_border("└┬┘", updates, over.updates, columns), _labels("update", updates, over.updates, columns)]
    return "\n".join(line.rstrip() for line in lines)


def ticks(end: float, most: int = 8) -> list[int]:
    """Round numbers from 0 to `end`, at most so many and the 0."""
    size = 1
    while True:
        for step in (size, 2 * size, 5 * size):
            if end / step <= most:
                return list(range(0, int(end) + 1, step))
        size *= 10


def epoch_marks(over: Horizon) -> list[tuple[int, int]]:
    """(updates made, epochs made) for round numbers of epochs."""
    return [(over.ends[epoch - 1] if epoch else 0, epoch) for epoch in ticks(over.epochs)]


def _panel(curve: Curve, updates: int, columns: int, rows: int) -> list[str]:
    labels = {0: curve.high, rows - 1: curve.low}
    lines = []
    for row, cells in enumerate(_dots(curve, updates, columns, rows)):
        label = f"{labels[row]:.3g}" if row in labels else curve.name if row == rows // 2 else ""
        side = "┤" if row in labels else "│"
        drawn = "".join(chr(0x2800 + bits) if bits else " " for bits in cells)
        lines.append(f"{label:>{MARGIN - 1}} {side}{drawn}│")
    return lines


def _dots(curve: Curve, updates: int, columns: int, rows: int) -> list[list[int]]:
    """The bits of each character, straight lines between the points."""
    cells = [[0] * columns for _ in range(rows)]
    across, down = 2 * columns - 1, 4 * rows - 1
    height = curve.high - curve.low
    at = [(u / updates * across, (curve.high - value) / height * down) for u, value in curve.points]
    for (x0, y0), (x1, y1) in zip(at, at[1:] or at, strict=False):
        steps = max(1, math.ceil(abs(x1 - x0)), math.ceil(abs(y1 - y0)))
        for step in range(steps + 1):
            x, y = round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps)
            cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    return cells


def _border(ends_and_tick: str, marks: list[tuple[int, int]], updates: int, columns: int) -> str:
    left, tick, right = tuple(ends_and_tick)
    at = {_column(update, updates, columns) for update, _ in marks}
    return " " * MARGIN + left + "".join(tick if c in at else "─" for c in range(columns)) + right


def _labels(name: str, marks: list[tuple[int, int]], updates: int, columns: int) -> str:
    line = [" "] * (MARGIN + 1 + columns + MARGIN)
    line[: MARGIN - 1] = list(f"{name:>{MARGIN - 1}}")
    for update, label in marks:
        shown = f"{label:,}"
        begin = MARGIN + 1 + _column(update, updates, columns) - len(shown) // 2
        line[begin : begin + len(shown)] = list(shown)
    return "".join(line)


def _column(update: int, updates: int, columns: int) -> int:
    return round(update / updates * (2 * columns - 1)) // 2


def png(curves: list[Curve], over: Horizon, title: str, file: Path) -> None:
    """The same as an image. Raises UserError without matplotlib or where the file cannot be written."""
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
    try:
        figure.savefig(file, format="png", dpi=150)
    except OSError as error:
        raise UserError(f"--png {file} cannot be written: {error.strerror}") from None

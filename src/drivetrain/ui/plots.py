"""Curves over the updates of a run: drawn in a terminal by plotext, or as a PNG by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from drivetrain.core.errors import UserError
from drivetrain.core.horizon import Horizon

LABEL_WIDTH = 8  # characters of the labels left of a panel
LINES = 16, 10  # of the first panel and of each further one, with its axes


class Curve(NamedTuple):
    """What one panel shows: `points` are (update, value)."""

    name: str
    points: list[tuple[int, float]]
    low: float  # of the vertical axis
    high: float


def text(curves: list[Curve], over: Horizon, width: int = 80) -> str:
    """The curves as lines of text, one panel below the other; updates along the bottom, epochs along the top."""
    panels = [_panel(curve, over, width, first=number == 0) for number, curve in enumerate(curves)]
    return "\n".join(panels)


def _panel(curve: Curve, over: Horizon, width: int, first: bool) -> str:
    """One curve in a frame with labelled axes; `first` is the tall panel."""
    import plotext

    plotext.clear_figure()
    plotext.limit_size(False, False)  # the caller knows the width; a pipe has none
    plotext.plot_size(width, LINES[0] if first else LINES[1])
    plotext.theme("clear")  # no colours: the text is the same in a pipe
    plotext.scatter([0], [curve.low], marker=" ", xside="upper")  # an axis without data would not be drawn
    plotext.plot(*map(list, zip(*curve.points, strict=True)), marker="braille")
    epochs = epoch_marks(over)
    updates = ticks(over.updates)
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


def ticks(end: float, most: int = 8) -> list[int]:
    """Round numbers from 0 to `end`, at most `most` of them beside the 0."""
    size = 1
    while True:
        for step in (size, 2 * size, 5 * size):
            if end / step <= most:
                return list(range(0, int(end) + 1, step))
        size *= 10


def epoch_marks(over: Horizon) -> list[tuple[int, int]]:
    """(updates made, epochs made) for round numbers of epochs."""
    return [(over.ends[epoch - 1] if epoch else 0, epoch) for epoch in ticks(over.epochs)]


def png(curves: list[Curve], over: Horizon, title: str, file: Path) -> None:
    """Write the same curves as an image. Raises UserError without matplotlib or where the file cannot be written."""
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

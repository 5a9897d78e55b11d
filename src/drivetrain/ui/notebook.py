"""Notebook output: a page in its own frame, and a chart that follows a run while it trains."""

from __future__ import annotations

import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

from drivetrain.core.typed import JsonMapping, is_number
from drivetrain.ui.pages import charts
from drivetrain.ui.sheet import PagePart, Sheet, escape

DRAW_EVERY_S = 2.0


def framed(page: str, height: int) -> str:
    """An HTML page in a frame, so that its styles and scripts stay apart."""
    return f'<iframe srcdoc="{escape(page)}" style="width:100%;height:{height}px;border:0"></iframe>'


def live_charts(total: int, metric: str) -> list[LiveChart]:
    """The chart of a run with `total` updates, in a notebook's kernel; none elsewhere, nor in the kernel's forks."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return [LiveChart(total, metric)] if hasattr(shell, "kernel") and multiprocessing.parent_process() is None else []


class LiveChart:
    """A log writer that draws the loss and the ranking metric as a run's records come in."""

    def __init__(self, total: int, metric: str) -> None:
        self._total = total
        self._curves: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in ("loss", metric)}
        self._handle: Any = None
        self._update, self._drawn = 0, 0.0

    def log(self, record: JsonMapping) -> None:
        """Add a record of training or of an evaluation."""
        training = record["event"] == "train"
        if not training and (record["event"] != "evaluate" or "weights" in record):
            return
        for name, curves in self._curves.items():
            if is_number(value := record.get(name)):
                curves.setdefault("training" if training else str(record["set"]), []).append((record["update"], value))
        self._update = record["update"]
        if time.monotonic() - self._drawn > DRAW_EVERY_S:
            self._draw()

    def _draw(self) -> None:
        from IPython.display import display

        lines = {name: [charts.ChartLine(*curve) for curve in curves.items()] for name, curves in self._curves.items()}
        drawn = charts.grid([charts.curves(name.replace("_", " ").capitalize(), each) for name, each in lines.items()])
        page = Sheet("", f"update {self._update:,} of {self._total:,}", [PagePart(drawn)]).page()
        shown = {"text/html": framed(page, 330), "text/plain": f"update {self._update} of {self._total}"}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
        self._drawn = time.monotonic()

    def log_image(self, name: str, update: int, path: Path) -> None:
        """Show nothing: the run's page has its pictures."""

    def close(self, status: str = "completed") -> None:
        """Draw the last records."""
        self._draw()

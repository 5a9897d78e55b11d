"""The answer of a comparison: one sentence, and a table of speed and result that a reader takes in at a glance."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from drivetrain.measure.benchmark.comparison import Comparison, Row
from drivetrain.measure.benchmark.noninferiority import FAIL, FIRST, Verdict, in_words

WIDTH, MARGIN = 190, 12  # of the drawing of an interval, in pixels
TICK_WIDTH = 34  # of a number on the scale, in pixels
TICKS = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)


def headline(comparison: Comparison) -> str:
    """Return the answer in one sentence: the fastest arm whose result is known to be as good, and which result is better."""
    first, *others = comparison.rows
    base = first.label or "the first arm"
    faster = [row for row in others if row.ratio is not None and row.ratio.low is not None and row.ratio.low > 1]
    judged = comparison.settings.quality
    good = [row for row in faster if not judged or (row.verdict is not None and row.verdict.outcome == "PASS")]
    better = max(filter(_improvement, others), key=_improvement, default=None)
    if not good:
        known = " with a result known to be as good" if judged else ""
        if better is None:
            return f"No arm is certainly faster than {base}{known}."
        return f"{_subject(comparison, better)} has {_better(better, base)}, but no arm is certainly faster{known}."
    best = max(good, key=lambda row: row.ratio.middle if row.ratio else 0.0)
    assert best.ratio is not None
    low, high = best.ratio.low, best.ratio.high
    speed = f"{_subject(comparison, best)} is {best.ratio.middle:.2f} × as fast as {base} ({low:.2f} to {high:.2f})"
    if not judged:
        return f"{speed}."
    if _improvement(best):
        return f"{speed}, and has {_better(best, base)}."
    other = "" if better is None else f"; {_subject(comparison, better)} has {_better(better, base)}"
    return f"{speed}, and its result is no worse{other}."


def _subject(comparison: Comparison, row: Row) -> str:
    return comparison.subject.format(row.label.removeprefix("+ ").removeprefix("− "))


def _improvement(row: Row) -> float:
    """Return by how much an arm's metric is better than the first arm's, where that is certain; else 0."""
    found = row.verdict and row.verdict.degradation.get(row.verdict.metric)
    certain = found and found.high is not None and found.high < 0 and row.verdict and row.verdict.outcome != FAIL
    return -found.middle if found and certain else 0.0


def _better(row: Row, base: str) -> str:
    """Return which figure is better than that of `base`, the first arm, and by how much, in words."""
    assert row.verdict is not None
    return f"a better {row.verdict.metric} than {base}, by {_difference(row.verdict).removeprefix('better by ')}"


def overview(comparison: Comparison) -> str:
    """Return an HTML table: each arm, its speed with the interval drawn, and whether its result is as good."""
    rows, judged = comparison.rows, comparison.settings.quality
    scale = _Scale(rows)
    metric = next((row.verdict.metric for row in rows if row.verdict is not None), "the metric")
    of_result = ["result", f"{html.escape(metric)} of the validation set", "seeds"] if judged else []
    head = ["arm", "speed", scale.axis(), *of_result]
    lines = "".join(f"<tr>{_cells(row, scale, first=not n, judged=judged)}</tr>" for n, row in enumerate(rows))
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    return f'<div class="wide"><table class="overview"><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cells(row: Row, scale: _Scale, first: bool, judged: bool) -> str:
    ratio = f"{row.ratio.middle:.2f} ×" if row.ratio is not None else "–"
    label = html.escape(row.label or "the first arm")
    cells = [f"<td><code>{label}</code></td>", f"<td>{ratio}</td>", f"<td>{scale.bar(row, first)}</td>"]
    verdict = row.verdict
    if judged and verdict is None:
        cells += ["<td>–</td>", f'<td class="text">{html.escape(row.error or "")}</td>', "<td></td>"]
    elif judged and verdict is not None:
        outcome = "" if verdict.outcome == FIRST else verdict.outcome
        cells += [f'<td class="{outcome}">{outcome}</td>', f"<td>{html.escape(_difference(verdict))}</td>"]
        cells.append(f"<td>{len(verdict.runs)}</td>")
    return "".join(cells)


def _difference(verdict: Verdict) -> str:
    """Return by how much the metric differs from the first arm's; the first arm's own value; why there is neither."""
    found = verdict.degradation.get(verdict.metric or "")
    if found is None:
        return verdict.reason.split("; ")[0].split(", ")[0].removeprefix(f"{verdict.metric} ")
    return in_words(*found)


class _Scale:
    """A logarithmic scale of ratios, on which twice as fast lies as far from 1 as half as fast."""

    def __init__(self, rows: Sequence[Row]) -> None:
        shown = [value for row in rows if row.ratio is not None for value in row.ratio if value]
        self.low, self.high = min([0.9, *shown]) / 1.03, max([1.1, *shown]) * 1.03

    def x(self, ratio: float) -> float:
        """Return the pixel of a ratio."""
        share = math.log(ratio / self.low) / math.log(self.high / self.low)
        return MARGIN + (WIDTH - 2 * MARGIN) * share

    def axis(self) -> str:
        """Return the drawing of the scale's numbers."""
        ticks: list[float] = []
        for tick in sorted((t for t in TICKS if self.low <= t <= self.high), key=lambda t: t != 1):  # 1 has the first place
            if all(abs(self.x(tick) - self.x(other)) >= TICK_WIDTH for other in ticks):
                ticks.append(tick)
        texts = "".join(f'<text x="{self.x(t):.1f}" y="11" text-anchor="middle">{t:g} ×</text>' for t in ticks)
        return f'<svg class="axis" width="{WIDTH}" height="14" role="img" aria-label="times as fast">{texts}</svg>'

    def bar(self, row: Row, first: bool) -> str:
        """Return the drawing of an arm's ratio and its interval, beside the line of 1."""
        line = f'<line class="one" x1="{self.x(1):.1f}" x2="{self.x(1):.1f}" y1="0" y2="18"/>'
        if row.ratio is None:
            return f'<svg width="{WIDTH}" height="18">{line}</svg>'
        low, middle, high = row.ratio.low, row.ratio.middle, row.ratio.high
        kind = "same" if first or not low or low <= 1 <= high else "faster" if low > 1 else "slower"
        drawn = f'<line x1="{self.x(low):.1f}" x2="{self.x(high):.1f}" y1="9" y2="9"/>' if low and not first else ""
        said = f"{middle:.2f}" + (f", 95 % interval {low:.3f} to {high:.3f}" if low and not first else "")
        return (
            f'<svg width="{WIDTH}" height="18" role="img" aria-label="{said}"><title>{said}</title>{line}'
            f'<g class="{kind}">{drawn}<circle cx="{self.x(middle):.1f}" cy="9" r="4.5"/></g></svg>'
        )

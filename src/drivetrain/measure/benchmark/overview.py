"""The answer of a comparison: one sentence, and a table of speed and result that a reader takes in at a glance."""

from __future__ import annotations

import math
from collections.abc import Sequence

from drivetrain.measure.benchmark.comparison import Comparison, Row
from drivetrain.measure.benchmark.noninferiority import FIRST, PASS, Verdict, in_words
from drivetrain.ui.pages.blocks import escape, rich_table

WIDTH, MARGIN = 160, 12  # of the drawing of an interval, in pixels
TICK_WIDTH = 34  # of a number on the scale, in pixels
# Columns after the speed, where they differ.
MORE = ("update, median", "waiting for data", "memory", "compiling", "pays after", "error")
AS_IT = ("as it is", "as it was")  # what the run that is to be made faster is called
TICKS = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)


def names(comparison: Comparison) -> list[str]:
    """A name for each arm: of the first one what not all have, of each other one what it has otherwise than the first."""
    labels = [row.label or "the first arm" for row in comparison.rows]
    words = [label.split() for label in labels]
    common = set(words[0]).intersection(*words[1:])
    left_out = [common, *[set(words[0])] * (len(words) - 1)]
    short = [
        " ".join(word for word in each if word not in out) or label
        for each, out, label in zip(words, left_out, labels, strict=True)
    ]
    return short if len(set(short)) == len(short) else labels


def winner(comparison: Comparison) -> int | None:
    """The number of the fastest arm that is certainly faster than the first, with a result known to be as good."""
    judged = comparison.settings.quality
    good = {
        n: row.ratio.middle
        for n, row in enumerate(comparison.rows[1:], 1)
        if row.ratio is not None and row.ratio.low is not None and row.ratio.low > 1
        and (not judged or (row.verdict is not None and row.verdict.outcome == PASS))
    }  # fmt: skip
    return max(good, key=lambda n: good[n]) if good else None


def headline(comparison: Comparison) -> str:
    """Return the answer in one sentence: the fastest arm whose result is known to be as good, or that there is none."""
    called, best = names(comparison), winner(comparison)
    base, judged = f"the run {called[0]}" if called[0] in AS_IT else called[0], comparison.settings.quality
    if best is None:
        known = " with a result known to be as good" if judged else ""
        return f"No arm is certainly faster than {base}{known}."
    ratio = comparison.rows[best].ratio
    assert ratio is not None
    subject = comparison.subject.format(called[best].removeprefix("+ ").removeprefix("− "))
    speed = f"{subject} is {ratio.middle:.2f} × as fast as {base} ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{speed}, and its result is no worse." if judged else f"{speed}."


def overview(comparison: Comparison) -> str:
    """Return an HTML table: each arm, whether its result is as good, its speed with the interval drawn, and what differs."""
    rows, judged = comparison.rows, comparison.settings.quality
    scale = _Scale(rows)
    metric = next((row.verdict.metric for row in rows if row.verdict is not None), "the metric")
    difference, outcome = ([f"{metric} of the validation set"], ["no worse?", "seeds"]) if judged else ([], [])
    more, of_each = _more(comparison)
    cells = [
        [f"<code>{escape(name)}</code>", *_of_arm(row, scale, not n, judged), *map(escape, of_each[n])]
        for n, (name, row) in enumerate(zip(names(comparison), rows, strict=True))
    ]
    header = ["arm", *difference, "speed", "95 % interval", *outcome, *more]
    below = {"95 % interval": scale.axis()}
    return rich_table(header, cells, [*difference, "error"], True, winner(comparison), below, name="The arms")


def _more(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The other figures of the arms, as far as they differ: header, and the cells of each arm."""
    header = [name for name in comparison.table()[0] if name in MORE]
    at = [comparison.table()[0].index(name) for name in header]
    rows = [[row[n] for n in at] for row in comparison.table()[1]]
    kept = [n for n in range(len(header)) if len({row[n] for row in rows}) > 1]
    return [header[n] for n in kept], [[row[n] for n in kept] for row in rows]


def _of_arm(row: Row, scale: _Scale, first: bool, judged: bool) -> list[str]:
    """The cells of an arm after its name, as HTML: the metric, the speed, and the verdict."""
    speed = [f"{row.ratio.middle:.2f} ×" if row.ratio is not None else "–", scale.bar(row, first)]
    return [*_difference_of(row, judged), *speed, *_outcome(row, judged)]


def _difference_of(row: Row, judged: bool) -> list[str]:
    """How the metric differs from the first arm's, where that was asked for."""
    if not judged:
        return []
    return [escape(_difference(row.verdict) if row.verdict is not None else row.error or "–")]


def _outcome(row: Row, judged: bool) -> list[str]:
    """Whether the result is no worse, and the seeds that this rests on, where that was asked for."""
    if not judged or row.verdict is None:
        return ["–", "–"] if judged else []
    return ["" if row.verdict.outcome == FIRST else row.verdict.outcome, str(len(row.verdict.runs))]


def _difference(verdict: Verdict) -> str:
    """Return by how much the metric differs from the first arm's; the first arm's own value; why there is neither."""
    found = verdict.degradation.get(verdict.metric or "")
    if found is None:
        return verdict.reason.split("; ")[0].split(", ")[0].removeprefix(f"{verdict.metric} ")
    return in_words(*found)


class _Scale:
    """A logarithmic scale of ratios, on which twice as fast lies as far from 1 as half as fast."""

    def __init__(self, rows: Sequence[Row]) -> None:
        shown = [value for row in rows if row.ratio is not None for value in row.ratio if value and math.isfinite(value)]
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
        return f'<svg class="ratio" viewBox="0 0 {WIDTH} 14" role="img" aria-label="logarithmic axis">{texts}</svg>'

    def bar(self, row: Row, first: bool) -> str:
        """Return the drawing of an arm's ratio and its interval, beside the line of 1."""
        line = f'<line class="one" x1="{self.x(1):.1f}" x2="{self.x(1):.1f}" y1="0" y2="18"/>'
        if row.ratio is None:
            return f'<svg class="ratio" viewBox="0 0 {WIDTH} 18" role="img" aria-label="not measured">{line}</svg>'
        low, middle, high = row.ratio.low, row.ratio.middle, row.ratio.high  # without an interval 0 or None, and infinite
        kind = "same" if first or not low or low <= 1 <= high else "faster" if low > 1 else "slower"
        drawn = f'<line x1="{self.x(low):.1f}" x2="{self.x(high):.1f}" y1="9" y2="9"/>' if low and not first else ""
        said = f"{middle:.2f}" + (f", 95 % interval {low:.3f} to {high:.3f}" if low and not first else "")
        return (
            f'<svg class="ratio" viewBox="0 0 {WIDTH} 18" role="img" aria-label="{said}"><title>{said}</title>{line}'
            f'<g class="{kind}">{drawn}<circle cx="{self.x(middle):.1f}" cy="9" r="4.5"/></g></svg>'
        )

"""The HTML pages of comparisons: the table, the ratios with their intervals, and the rates round by round."""

from __future__ import annotations

import html
import shlex
from collections.abc import Sequence
from typing import Any

from drivetrain.measure.benchmark import noninferiority
from drivetrain.measure.benchmark.comparison import Comparison
from drivetrain.measure.benchmark.overview import headline, overview
from drivetrain.measure.html import page, paragraphs, plot, table


def comparison_page(comparison: Comparison, argv: Sequence[str], verb: str = "compare") -> str:
    """The page of `drivetrain compare`, or of another command that compares."""
    body, figures = _section(comparison, "")
    return page("Techniques compared", [*body, *footer(verb, comparison, argv)], figures)


def ablation_page(recipe: str, baseline: str, comparisons: dict[str, Comparison], argv: Sequence[str]) -> str:
    """The page of `drivetrain ablate`."""
    names = (html.escape(name) for name in (recipe, baseline))
    introduction = "<p>What each technique of the recipe <b>{}</b> is worth against <b>{}</b>.".format(*names)
    if len(comparisons) > 1:
        introduction += " Where a technique gains when it is added alone, and its removal costs nothing, another makes up for it."
    body, figures = sections(comparisons)
    last = next(reversed(comparisons.values()))
    return page(f"{recipe} against {baseline}", [f"{introduction}</p>", *body, *footer("ablate", last, argv)], figures)


def sections(comparisons: dict[str, Comparison]) -> tuple[list[str], dict[str, Any]]:
    """The comparisons under their titles: HTML, and the figures by id."""
    body: list[str] = []
    figures: dict[str, Any] = {}
    for number, (title, comparison) in enumerate(comparisons.items()):
        section, drawn = _section(comparison, str(number))
        body += [f"<h1>{html.escape(title)}</h1>", *section]
        figures |= drawn
    return body, figures


def _section(comparison: Comparison, name: str) -> tuple[list[str], dict[str, Any]]:
    """One comparison's table and figures; `name` makes the figures' ids unique."""
    header, rows = comparison.table()
    rounds = max(len(row.rates) for row in comparison.rows)
    body = [
        f'<p class="answer">{html.escape(headline(comparison))}</p>',
        overview(comparison),
        f'<p class="soft">Relative to {html.escape(comparison.rows[0].label or "the first arm")}: {rounds} rounds, each with '
        f"fresh processes that run two timed blocks of about {comparison.settings.block_s:g} s; one process runs at a time. "
        "The point is the Hodges–Lehmann estimate over the rounds, the bar its 95 % interval (Wilcoxon). Where the bar includes "
        "1, the rounds do not distinguish the two.</p>",
        *paragraphs(comparison.notes, bold=True),
        f"<details{' open' if len(comparison.rows) < 8 else ''}><summary>All figures</summary>",
        table(header, rows, ("because", "error")),
        "</details>",
        "<h2>Round by round</h2>",
        '<p class="soft">A change that all arms share is drift of the machine; a change of one arm alone is its own.</p>',
        plot(f"rounds{name}", 360 + 12 * len(comparison.rows)),
    ]
    if comparison.settings.quality:
        body += ["<h2>Whether the result is still as good</h2>", *paragraphs([noninferiority.__doc__ or ""])]
    return body, {f"rounds{name}": _rounds(comparison)}


def footer(verb: str, comparison: Comparison, argv: Sequence[str]) -> list[str]:
    """The command that repeats the measurement, and the environment in which it ran."""
    facts = comparison.environment
    rows = [(k, str(facts[k])) for k in ("drivetrain", "python", "platform", "processor", "git_commit", "lock_hash")]
    rows += list(facts["versions"].items())
    return [
        "<h2>To run it again</h2>",
        f"<pre>drivetrain {verb} {html.escape(shlex.join(argv))}</pre>",
        "<h2>Where it ran</h2>",
        table(("", ""), rows, ("",)),
    ]


def _rounds(comparison: Comparison) -> dict[str, Any]:
    """Each arm's samples a second against the round."""
    lines = [
        {"type": "scatter", "mode": "lines+markers", "name": row.label or "the first arm", "y": row.rates,
         "x": list(range(1, len(row.rates) + 1))}
        for row in comparison.rows if row.rates
    ]  # fmt: skip
    layout = {
        "margin": {"t": 10, "r": 10}, "legend": {"orientation": "h", "y": -0.25},
        "xaxis": {"title": {"text": "round"}, "dtick": 1}, "yaxis": {"title": {"text": "samples/s"}, "rangemode": "tozero"},
    }  # fmt: skip
    return {"data": lines, "layout": layout}

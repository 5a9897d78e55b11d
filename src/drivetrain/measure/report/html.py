"""Reports as one HTML file that needs no network: a table and plots, light and dark, wide and narrow."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.measure.benchmark.compare import Comparison
    from drivetrain.measure.tune.range_test import RangeTest

STYLE = """
:root {
  color-scheme: light dark; --ink: #1c2024; --soft: #60646c; --line: #d9d9e0; --ground: #fcfcfd;
  --good: #18794e; --bad: #ce2c31; --mark: #3e63dd
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #edeef0; --soft: #b0b4ba; --line: #363a3f; --ground: #111113;
    --good: #3dd68c; --bad: #ff9592; --mark: #9eb1ff
  }
}
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  max-width: 1100px; margin: 0 auto; padding: 1.2rem
}
h1 { font-size: 1.5rem; margin: .2rem 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem }
p, li { max-width: 75ch } .soft { color: var(--soft) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { text-align: right; padding: .3rem .7rem; border-bottom: 1px solid var(--line) }
th { color: var(--soft); font-weight: 500 } th:first-child, td:first-child { text-align: left }
td.text { text-align: left; white-space: normal; min-width: 18rem }
.sortable th { cursor: pointer } .PASS { color: var(--good) } .FAIL { color: var(--bad) }
code, pre { font: 13px/1.5 ui-monospace, monospace } pre { overflow-x: auto; padding: .6rem; border: 1px solid var(--line) }
@media (max-width: 600px) { td:first-child { white-space: normal; min-width: 8rem } }
.plot { width: 100%; height: 360px }
"""

# Figures take the page's colours, and again when the reader's scheme changes.
SCRIPT = """
const figures = JSON.parse(document.getElementById('figures').textContent);
function draw() {
  const css = getComputedStyle(document.documentElement), of = name => css.getPropertyValue(name).trim();
  const line = of('--line');
  for (const [id, figure] of Object.entries(figures)) {
    const layout = structuredClone(figure.layout);
    Object.assign(layout, {paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', font: {color: of('--ink'), size: 12}});
    for (const key of Object.keys(layout)) if (/^[xy]axis/.test(key))
      Object.assign(layout[key], {gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true});
    Plotly.react(id, figure.data, layout, {responsive: true, displayModeBar: false});
  }
}
for (const head of document.querySelectorAll('.sortable th')) head.onclick = () => {
  const body = head.closest('table').tBodies[0], at = head.cellIndex, turn = head.dataset.turn = head.dataset.turn == 1 ? -1 : 1;
  const key = row => row.cells[at].textContent, number = text => parseFloat(text.replace(/,/g, ''));
  body.append(...[...body.rows].sort((a, b) => turn * (number(key(a)) - number(key(b)) || key(a).localeCompare(key(b)))));
};
draw();
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
"""

DOTTED = {"dash": "dot", "color": "#8b8d98"}


def page(title: str, body: Sequence[str], figures: dict[str, Any]) -> str:
    """The file: `body` holds a `plot(id)` where a figure, a dict of Plotly's data and layout, is to stand."""
    from plotly.offline import get_plotlyjs

    data = json.dumps(figures, allow_nan=False).replace("</", "<\\/")
    scripts = f"<script>{get_plotlyjs()}</script><script>{SCRIPT}</script>" if figures else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f"<h1>{html.escape(title)}</h1>{''.join(body)}"
        f'<script type="application/json" id="figures">{data}</script>{scripts}</body></html>\n'
    )


def plot(name: str, height: int = 360) -> str:
    """The place of a figure."""
    return f'<div class="plot" id="{name}" style="height:{height}px"></div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[str] = (), sortable: bool = False) -> str:
    """A table; columns named in `text` hold sentences. A click on a sortable one's head orders it."""
    prose = {n for n, name in enumerate(header) if name in text}

    def cell(n: int, value: str) -> str:
        word = value.split()[-1] if value in ("PASS", "FAIL", "INCONCLUSIVE") else ""
        return f'<td class="{"text " if n in prose else ""}{word}">{html.escape(value)}</td>'

    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    lines = "".join(f"<tr>{''.join(cell(n, value) for n, value in enumerate(row))}</tr>" for row in rows)
    kind = ' class="sortable"' if sortable else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def comparison_page(found: Comparison, argv: Sequence[str], verb: str = "compare") -> str:
    """The page of `drivetrain compare`, or of another verb that compares."""
    body, figures = _section(found, "")
    return page("Techniques compared", [*body, *_end(verb, found, argv)], figures)


def ablation_page(recipe: str, baseline: str, parts: dict[str, Comparison], argv: Sequence[str]) -> str:
    """The page of `drivetrain ablate`."""
    body = [
        f"<p>What each technique of the recipe <b>{html.escape(recipe)}</b> is worth against <b>{html.escape(baseline)}</b>: "
        "added one after another, added alone, and taken away alone. A technique that brings something alone and whose "
        "loss costs nothing is covered by another one.</p>"
    ]
    figures: dict[str, Any] = {}
    for number, (title, found) in enumerate(parts.items()):
        more, drawn = _section(found, str(number))
        body += [f"<h1>{html.escape(title)}</h1>", *more]
        figures |= drawn
    last = next(reversed(parts.values()))
    return page(f"{recipe} against {baseline}", [*body, *_end("ablate", last, argv)], figures)


def tuning_page(parts: dict[str, Comparison], tested: RangeTest | None, said: Sequence[str], argv: Sequence[str]) -> str:
    """The page of `drivetrain tune`."""
    from drivetrain.measure.tune import range_test

    body = [f"<p><b>{html.escape(line)}</b></p>" for line in said]
    figures: dict[str, Any] = {}
    if tested is not None:
        told = [f"<p>{html.escape(line)}</p>" for line in range_test.advice(tested)]
        body += ["<h1>Learning rate range test</h1>", *told, plot("range")]
        figures["range"] = range_test.figure(tested)
    for number, (title, found) in enumerate(parts.items()):
        more, drawn = _section(found, str(number))
        body += [f"<h1>{html.escape(title)}</h1>", *more]
        figures |= drawn
    ended = _end("tune", next(reversed(parts.values())), argv) if parts else []
    return page("What makes this run faster here", [*body, *ended], figures)


def _section(found: Comparison, name: str) -> tuple[list[str], dict[str, Any]]:
    """A comparison's table and plots."""
    from drivetrain.measure.benchmark import noninferiority
    from drivetrain.measure.benchmark.compare import grid

    header, rows = grid(found)
    rounds = max(len(row.rates) for row in found.rows)
    body = [
        f'<p class="soft">Measured by {html.escape(found.rows[0].label or "the first arm")}: {rounds} rounds, '
        f"each with fresh processes that take two turns of about {found.settings.turn_s:g} s; one moves at a time.</p>",
        table(header, rows, ("because", "error")),
        *(f"<p><b>{html.escape(line)}</b></p>" for line in found.said),
        "<h2>Samples a second, as a multiple of the first arm's</h2>",
        '<p class="soft">The point is the Hodges–Lehmann estimate over the rounds, the bar its 95 % interval (Wilcoxon). '
        "Where it reaches over 1 the rounds do not tell the two apart.</p>",
        plot(f"ratios{name}", 100 + 34 * len(found.rows)),
        "<h2>Round by round</h2>",
        '<p class="soft">What all arms share is the machine, which wanders; what one does alone is the arm.</p>',
        plot(f"rounds{name}", 360 + 12 * len(found.rows)),
    ]
    if found.settings.quality:
        body += ["<h2>Whether the result is still right</h2>", f"<p>{html.escape(noninferiority.__doc__ or '')}</p>"]
    return body, {f"ratios{name}": _ratios(found), f"rounds{name}": _rounds(found)}


def _end(verb: str, found: Comparison, argv: Sequence[str]) -> list[str]:
    """How it is repeated, and where it ran."""
    facts = found.environment
    rows = [(k, str(facts[k])) for k in ("drivetrain", "python", "platform", "processor", "git_commit", "lock_hash")]
    rows += list(facts["versions"].items())
    return [
        "<h2>To run it again</h2>",
        f"<pre>drivetrain {verb} {html.escape(shlex.join(argv))}</pre>",
        "<h2>Where it ran</h2>",
        table(("", ""), rows, ("",)),
    ]


def _ratios(found: Comparison) -> dict[str, Any]:
    rows = [row for row in reversed(found.rows) if row.ratio is not None]
    ratios = [row.ratio for row in rows if row.ratio is not None]
    middles = [r.middle for r in ratios]
    around = [(r.high - r.middle, r.middle - r.low) if r.low else (0.0, 0.0) for r in ratios]  # 0: too few rounds
    return {
        "data": [
            {
                "type": "scatter", "mode": "markers", "x": middles, "y": [row.label for row in rows],
                "marker": {"size": 9, "color": "#3e63dd"},
                "error_x": {
                    "type": "data", "symmetric": False, "thickness": 2, "color": "#3e63dd",
                    "array": [above for above, _ in around], "arrayminus": [below for _, below in around],
                },
            }
        ],
        "layout": {
            "margin": {"t": 10, "r": 10}, "xaxis": {"rangemode": "tozero"}, "yaxis": {"type": "category"},
            "shapes": [{"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": DOTTED}],
        },
    }  # fmt: skip


def _rounds(found: Comparison) -> dict[str, Any]:
    lines = [
        {"type": "scatter", "mode": "lines+markers", "name": row.label or "the first arm", "y": row.rates,
         "x": list(range(1, len(row.rates) + 1))}
        for row in found.rows if row.rates
    ]  # fmt: skip
    layout = {
        "margin": {"t": 10, "r": 10}, "legend": {"orientation": "h", "y": -0.25},
        "xaxis": {"title": {"text": "round"}, "dtick": 1}, "yaxis": {"title": {"text": "samples/s"}, "rangemode": "tozero"},
    }  # fmt: skip
    return {"data": lines, "layout": layout}

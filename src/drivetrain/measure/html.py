"""Building blocks of HTML pages that need no network: tables and Plotly figures, in light and dark colours."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from typing import Any

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
.answer { font-size: 1.15rem; max-width: 60rem }
.overview td, .overview th { padding: .18rem .5rem } .overview td:first-child { white-space: nowrap }
.overview svg { display: block } .overview text { font: 11px system-ui, sans-serif; fill: var(--soft) }
.overview .one { stroke: var(--line); stroke-width: 1.5 } .overview g line { stroke-width: 3; stroke-linecap: round }
.faster line { stroke: var(--good) } .faster circle { fill: var(--good) } .slower line { stroke: var(--bad) }
.slower circle { fill: var(--bad) } .same line { stroke: var(--soft) } .same circle { fill: var(--soft) }
.PASS, .FAIL { font-weight: 600 } summary { cursor: pointer; margin: 1rem 0 .4rem }
.plot { width: 100%; height: 360px }
"""

# Figures take the page's colours, and are drawn again when the reader's colour scheme changes.
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
  const body = head.closest('table').tBodies[0], at = head.cellIndex, sign = head.dataset.sign = head.dataset.sign == 1 ? -1 : 1;
  const key = row => row.cells[at].textContent, number = text => parseFloat(text.replace(/,/g, ''));
  body.append(...[...body.rows].sort((a, b) => sign * (number(key(a)) - number(key(b)) || key(a).localeCompare(key(b)))));
};
draw();
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
"""


def page(title: str, body: Sequence[str], figures: dict[str, Any]) -> str:
    """The whole file. `body` holds a `plot(id)` for each id in `figures`, whose values are Plotly's data and layout."""
    from plotly.offline import get_plotlyjs

    # In a script only JSON's own escapes are safe: "<!--<script>" would swallow the rest of the page.
    data = json.dumps(_finite(figures), allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e")
    scripts = f"<script>{get_plotlyjs()}</script><script>{SCRIPT}</script>" if figures else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f"<h1>{html.escape(title)}</h1>{''.join(body)}"
        f'<script type="application/json" id="figures">{data}</script>{scripts}</body></html>\n'
    )


def _finite(value: Any) -> Any:
    """Return Plotly's data with None for each number that JSON does not have, such as the loss of a diverged run."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot(name: str, height: int = 360) -> str:
    """The placeholder of a figure; `height` in pixels."""
    return f'<div class="plot" id="{name}" style="height:{height}px"></div>'


def paragraphs(lines: Sequence[str], bold: bool = False) -> list[str]:
    """Each line as a paragraph."""
    return [f"<p><b>{html.escape(line)}</b></p>" if bold else f"<p>{html.escape(line)}</p>" for line in lines]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[str] = (), sortable: bool = False) -> str:
    """A table. Columns named in `text` hold sentences; a sortable table is sorted by a click on a column's header."""
    prose = {n for n, name in enumerate(header) if name in text}

    def cell(n: int, value: str) -> str:
        verdict = value if value in ("PASS", "FAIL", "INCONCLUSIVE") else ""
        return f'<td class="{"text " if n in prose else ""}{verdict}">{html.escape(value)}</td>'

    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    lines = "".join(f"<tr>{''.join(cell(n, value) for n, value in enumerate(row))}</tr>" for row in rows)
    kind = ' class="sortable"' if sortable else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'

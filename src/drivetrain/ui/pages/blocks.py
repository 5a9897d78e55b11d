"""Building blocks of pages: the page itself, tables, paragraphs and commands. All text from outside is escaped here."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence

from drivetrain.ui import output
from drivetrain.ui.pages.style import SCRIPT, STYLE

VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE")
# Nothing is fetched, whatever text a page holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, verdict: str, body: Sequence[str]) -> str:
    """The whole file, which begins with the verdict: the answer to the page's question, in one sentence."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body><main>'
        f"<h1>{escape(sentence(verdict))}</h1>{''.join(body)}</main><script>{SCRIPT}</script></body></html>\n"
    )


def escape(text: object) -> str:
    """Text for HTML: as it is read, also where it holds marks, quotes, control characters or signs that turn its direction."""
    return html.escape(output.plain(str(text)))


def sentence(text: str) -> str:
    """A text on one line, with a full stop. It may begin with a name, such as a recipe's, which keeps its letters."""
    text = " ".join(text.split()) or "Nothing was found"
    return text if text.endswith((".", "!", "?")) else f"{text}."


def heading(text: str, level: int = 2) -> str:
    """A heading of a section."""
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraphs(lines: Sequence[str], soft: bool = False) -> list[str]:
    """Each line as a paragraph; `soft`: as a remark."""
    return [f'<p class="soft">{escape(line)}</p>' if soft else f"<p>{escape(line)}</p>" for line in lines]


def command(*lines: str) -> str:
    """Commands to copy."""
    return f'<pre tabindex="0"><code>{escape(chr(10).join(lines))}</code></pre>'


def folded(summary: str, content: Sequence[str], is_open: bool = False) -> str:
    """Content that a click shows."""
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{''.join(content)}</details>"


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    text: Collection[str] = (),
    sortable: bool = False,
    winner: int | None = None,
    bars: Mapping[str, Sequence[float | None]] | None = None,
    name: str = "a table",
) -> str:
    """A table; the first cell of a row names it.

    Columns named in `text` hold sentences. `winner` is the number of the best row. `bars` draws a bar below each cell of a
    column, as long as its value. `name` is read to who cannot see the table.
    """
    return rich_table(header, [[escape(cell) for cell in row] for row in rows], text, sortable, winner, bars=bars, name=name)


def rich_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    text: Collection[str] = (),
    sortable: bool = False,
    winner: int | None = None,
    below: Mapping[str, str] | None = None,
    bars: Mapping[str, Sequence[float | None]] | None = None,
    name: str = "a table",
) -> str:
    """The same of cells that are HTML already, and with HTML `below` headers."""
    prose = {n for n, title in enumerate(header) if title in text}
    parts = {n: _parts((bars or {})[title]) for n, title in enumerate(header) if title in (bars or {})}

    def cell(at: int, number: int, value: str) -> str:
        kind = " ".join(filter(None, ("text" if at in prose and at else "", value if value in VERDICTS else "")))
        of = f' class="{kind}"' if kind else ""
        if at == 0:
            return f'<th scope="row"{of}>{value}</th>'
        return f"<td{of}>{value}{parts[at][number] if at in parts else ''}</td>"

    def head(at: int, title: str) -> str:
        of, under = ' class="text"' if at in prose else "", (below or {}).get(title, "")
        if not sortable:
            return f'<th scope="col"{of}>{escape(title)}{under}</th>' if title else "<td></td>"
        return f'<th scope="col" aria-sort="none"{of}><button type="button">{escape(title)}</button>{under}</th>'

    lines = (
        f"<tr{' class=winner' if n == winner else ''}>{''.join(cell(at, n, value) for at, value in enumerate(row))}</tr>"
        for n, row in enumerate(rows)
    )
    heads = f"<thead><tr>{''.join(map(head, range(len(header)), header))}</tr></thead>" if any(header) else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(name)}"><table>{heads}'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def facts(rows: Sequence[tuple[str, str]], name: str) -> str:
    """A table of names and what they are, without a header."""
    return table(("", ""), rows, ("",), name=name)


def _parts(values: Sequence[float | None]) -> list[str]:
    """A bar for each value, as a share of the largest."""
    most = max((value for value in values if value is not None), default=0.0)
    return [
        f'<span class="part" style="--part:{100 * value / most:.0f}%"></span>' if value is not None and most > 0 else ""
        for value in values
    ]


def differing_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], always: int = 1
) -> tuple[list[str], list[list[str]], list[tuple[str, str]]]:
    """A table without the columns that are empty or the same in all rows, and those of them that say something.

    The first `always` columns stay.
    """
    kept, same = [], []
    for n, name in enumerate(header):
        cells = {row[n] for row in rows}
        if n < always or len(cells) > 1:
            kept.append(n)
        elif cells and (cell := next(iter(cells))) not in ("", "–"):
            same.append((name, cell))
    return [header[n] for n in kept], [[row[n] for n in kept] for row in rows], same

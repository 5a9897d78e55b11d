"""A sheet: a command's findings, written once and shown in the terminal, as an HTML page, in a CSV file and as plain values.

Text from outside (names of classes and runs, values, paths, errors) stays plain text in all of them, never markup, HTML or a
formula.
"""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from drivetrain.core.machine import files
from drivetrain.core.machine.csv_rows import csv_rows
from drivetrain.core.typed import JsonObject
from drivetrain.ui import output
from drivetrain.ui.output import echo
from drivetrain.ui.pages.style import SCRIPT, STYLE

VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE")
NARROW = 42  # characters of a phone's screen
EMPTY = ("–", "")  # cells without content
NAMED = 8  # left-out columns that are named
# A page fetches nothing, whatever text it holds.
LONG_WORD = 16  # letters
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def escape(text: object) -> str:
    """Text for HTML, shown literally, including marks, quotes, control characters and text direction marks."""
    return html.escape(output.plain(str(text)))


def breakable(text: object) -> str:
    """Text for HTML whose long words break after / and =, rather than anywhere."""
    words = (re.sub("(?<=[/=])(?=.)", "<wbr>", word) if len(word) > LONG_WORD else word for word in escape(text).split(" "))
    return " ".join(words)


def sentence(text: str) -> str:
    """A text on one line, with a full stop. A name at its start, such as a recipe's, keeps its letters."""
    text = " ".join(text.split()) or "Nothing was found"
    return text if text.endswith((".", "!", "?")) else f"{text}."


class PagePart(NamedTuple):
    """A part of a sheet other than a table: HTML for the page, and text for the terminal, if any."""

    html: str  # text from outside is escaped
    text: str | None = None

    def show(self) -> None:
        """Print the text."""
        if self.text is not None:
            echo(self.text)


def heading(text: str, level: int = 2) -> PagePart:
    """A heading."""
    return PagePart(f"<h{level}>{escape(text)}</h{level}>", f"\n{text}")


def words(*lines: str) -> PagePart:
    """Sentences, a paragraph each."""
    return PagePart("".join(f"<p>{escape(line)}</p>" for line in lines), "\n".join(lines) if lines else None)


def remarks(*lines: str) -> PagePart:
    """Sentences for the page only."""
    return PagePart("".join(f'<p class="soft">{escape(line)}</p>' for line in lines))


def commands(*lines: str) -> PagePart:
    """Commands: indented in the terminal, with a copy button each on a page."""
    boxes = (f'<pre tabindex="0"><code>{escape(line)}</code></pre>' for line in lines)
    return PagePart(f'<div class="commands">{"".join(boxes)}</div>', "\n".join(f"  {line}" for line in lines))


def folded(summary: str, sections: Sequence[Section], is_open: bool = False) -> PagePart:
    """A part that unfolds its sections after a click on the summary."""
    return PagePart(f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{joined(sections)}</details>")


@dataclass(frozen=True)
class Drawn:
    """A cell with extras on a page: a drawing (HTML) before its text, a background as dark as a share, or a link to a file."""

    text: str
    drawing: str = ""
    share: float | None = None
    file: str = ""  # relative to the page

    @property
    def html(self) -> str:
        """The drawing, and the text, as a link if there is a file."""
        link = f'<a href="{escape(quote(self.file))}">{escape(self.text)}</a>' if self.file else escape(self.text)
        return self.drawing + link

    def __str__(self) -> str:
        return self.text


Cell = str | Drawn


LATEX = {
    **{mark: rf"\{mark}" for mark in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "×": r"$\times$", "±": r"$\pm$", "−": "$-$", "–": "--",
}  # fmt: skip


def latex(text: str) -> str:
    """A text with LaTeX's special characters escaped."""
    return "".join(LATEX.get(mark, mark) for mark in text)


@dataclass(frozen=True)
class Table:
    """Rows with a header; the first cell of a row is its name."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    name: str = "a table"  # the accessible name
    prose: Collection[str] = ()  # columns that hold sentences
    sortable: bool = False
    winner: int | None = None  # the number of the best row
    bars: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # column → values, drawn as bars below its cells
    below: Mapping[str, str] = field(default_factory=dict)  # column → HTML below its header
    spare: Sequence[str] = ()  # columns that a narrow terminal leaves out, in this order
    most: int | None = None  # rows in the terminal; None: all
    width: int | None = None  # characters without a terminal; None: as many as needed

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[Cell]], **more: Any) -> Table:
        """A table of named columns."""
        return cls(list(columns), list(zip(*columns.values(), strict=True)), **more)

    def texts(self) -> list[list[str]]:
        """The cells as text."""
        return [[str(cell) for cell in row] for row in self.rows]

    def as_dict(self) -> list[dict[str, str]]:
        """Each row, by the names of its columns."""
        return [dict(zip(self.header, row, strict=True)) for row in self.texts()]

    def write_csv(self, path: Path) -> None:
        """Write it for spreadsheets: no cell is a formula."""
        with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            csv_rows(file)([self.header, *self.texts()])

    def written(self, form: Literal["markdown", "latex"]) -> str:
        """The table as text for a paper."""
        if form == "markdown":
            cells = [[cell.replace("|", "\\|") for cell in row] for row in (self.header, *self.texts())]
            lines = [f"| {' | '.join(row)} |" for row in cells]
            return "\n".join([lines[0], "|---" * len(self.header) + "|", *lines[1:]])
        rows = [" & ".join(map(latex, row)) + r" \\" for row in (self.header, *self.texts())]
        begin, end = rf"\begin{{tabular}}{{{'l' * len(self.header)}}}", r"\end{tabular}"
        return "\n".join([begin, r"\hline", rows[0], r"\hline", *rows[1:], r"\hline", end])

    def only(self, numbers: Sequence[int]) -> Table:
        """The columns of these numbers."""
        return replace(self, header=[self.header[n] for n in numbers], rows=[[row[n] for n in numbers] for row in self.rows])

    def used(self, always: int = 1) -> Table:
        """Drop the columns that are empty in all rows, except the first `always` ones."""
        columns = list(zip(*self.texts(), strict=True)) or [()] * len(self.header)
        return self.only([n for n, cells in enumerate(columns) if n < always or not set(cells) <= set(EMPTY)])

    def differing(self, always: int = 1) -> tuple[Table, list[tuple[str, str]]]:
        """Drop the columns with the same value in all rows, and return them with their values; `always` as in `used`."""
        found = self.used(always)
        columns = [(n, set(cells)) for n, cells in enumerate(zip(*found.texts(), strict=True))]
        same = [(found.header[n], cell) for n, cells in columns if n >= always and len(cells) == 1 for cell in cells]
        return found.only([n for n, cells in columns if n < always or len(cells) > 1]), same

    @property
    def html(self) -> str:
        """The table's HTML; if `sortable`, a button in each header sorts it."""
        prose = {n for n, title in enumerate(self.header) if title in self.prose}
        parts = {n: _parts(self.bars[title]) for n, title in enumerate(self.header) if title in self.bars}
        _, left_out = self.fitting(NARROW)
        spare = {n for n, title in enumerate(self.header) if title in left_out}

        def cell(at: int, number: int, value: Cell) -> str:
            text = (escape(value) if at else breakable(value)) if isinstance(value, str) else value.html
            kinds = "text" if at in prose and at else "", text if text in VERDICTS else "", "spare" if at in spare else ""
            kind = " ".join(filter(None, kinds))
            of = f' class="{kind}"' if kind else ""
            if isinstance(value, Drawn) and value.share is not None:
                of += f' style="--share:{value.share:.3f}"'
            if at == 0:
                return f'<th scope="row"{of}>{text}</th>'
            return f"<td{of}>{text}{parts[at][number] if at in parts else ''}</td>"

        def head(at: int, title: str) -> str:
            kind = " ".join(filter(None, ("text" if at in prose else "", "spare" if at in spare else "")))
            of, under = f' class="{kind}"' if kind else "", self.below.get(title, "")
            if not self.sortable:
                return f'<th scope="col"{of}>{escape(title)}{under}</th>' if title else "<td></td>"
            return f'<th scope="col" aria-sort="none"{of}><button type="button">{escape(title)}</button>{under}</th>'

        lines = (
            f"<tr{' class=winner' if n == self.winner else ''}>{''.join(cell(at, n, value) for at, value in enumerate(row))}</tr>"
            for n, row in enumerate(self.rows)
        )
        heads = f"<thead><tr>{''.join(map(head, range(len(self.header)), self.header))}</tr></thead>" if any(self.header) else ""
        return (
            f'<div class="wide" tabindex="0" role="region" aria-label="{escape(self.name)}"><table>{heads}'
            f"<tbody>{''.join(lines)}</tbody></table></div>"
            + (f'<p class="soft narrow">A wider screen shows: {escape(", ".join(left_out))}.</p>' if left_out else "")
        )

    def show(self) -> None:
        """Print the table: framed in a terminal, as plain columns elsewhere, without spare columns that do not fit."""
        from rich.table import Table as Grid
        from rich.text import Text

        live = output.can_redraw(sys.stdout)
        fitting, left_out = self.fitting(output.console().width if live else self.width)
        grid = Grid(*fitting.header, box=Grid().box if live else None, show_edge=live)
        for row in fitting.texts()[: self.most]:
            grid.add_row(*(Text(cell, overflow="fold") for cell in row))
        # Without a terminal nothing is cut, folded or coloured, whatever the environment variables ask for.
        console = output.console() if live else output.console(width=10_000, force_terminal=False, color_system=None)
        console.print(grid)
        if self.most is not None and len(self.rows) > self.most:
            echo(f"… and {len(self.rows) - self.most} more on the page")
        if left_out:
            more = f" and {len(left_out) - NAMED} more" if len(left_out) > NAMED else ""
            echo(f"not shown here: {'; '.join(left_out[:NAMED])}{more}")

    def fitting(self, room: int | None) -> tuple[Table, list[str]]:
        """The table as wide as fits, and the names of the omitted columns."""
        header, widths = list(self.header), [3 + max(map(len, column)) for column in zip(self.header, *self.texts(), strict=True)]
        left_out: list[str] = []
        for name in dict.fromkeys(self.spare) if room is not None else ():
            if name in header and sum(widths) >= (room or 0):
                widths[header.index(name)] = 0
                left_out.append(name)
        return self.only([n for n, name in enumerate(header) if name not in left_out]), left_out


def figure(value: float | None, form: str) -> str:
    """A figure in the given format; a dash without one."""
    return form.format(value) if value is not None else "–"


def setting(value: object, none: str = "–") -> str:
    """A config value as written in an override; a dash without one."""
    if isinstance(value, list):
        return f"[{','.join(setting(each, 'null') for each in value)}]"
    return none if value is None else str(value).lower() if isinstance(value, bool) else str(value)


Section = PagePart | Table


def facts(rows: Sequence[tuple[str, str]], name: str) -> Table:
    """A table of names and values, without a header."""
    return Table(("", ""), rows, name, ("",))


def machine(about: Mapping[str, object]) -> Table:
    """The versions and the machine of an environment.json, if recorded."""
    versions = about.get("versions")
    named = {name: about.get(name) for name in ("drivetrain", "python", "platform", "processor", "git_commit", "lock_hash")}
    named |= versions if isinstance(versions, dict) else {}
    return facts([(name, str(value)) for name, value in named.items() if value], "Versions and machine")


def under(title: str, *sections: Section, level: int = 2) -> list[Section]:
    """Sections under a heading."""
    return [heading(title, level), *sections]


def joined(sections: Sequence[Section]) -> str:
    """The HTML of several sections."""
    return "".join(section.html for section in sections)


def _parts(values: Sequence[float | None]) -> list[str]:
    """A bar for each value, as a share of the largest."""
    most = max((value for value in values if value is not None), default=0.0)
    return [
        f'<span class="part" style="--part:{100 * value / most:.0f}%"></span>' if value is not None and most > 0 else ""
        for value in values
    ]


@dataclass(frozen=True)
class Sheet:
    """An answer in one sentence, and the sections that support it."""

    title: str  # of the page's window
    answer: str
    sections: Sequence[Section]

    def show(self) -> None:
        """Print the sections and then the answer, so that it ends up next to the prompt."""
        for section in self.sections:
            section.show()
        echo(sentence(self.answer))

    def page(self) -> str:
        """The whole HTML file. It begins with the answer."""
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{escape(self.title)}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body><main>'
            f"<h1>{escape(sentence(self.answer))}</h1>{joined(self.sections)}</main><script>{SCRIPT}</script></body></html>\n"
        )

    def write(self, path: Path) -> Path:
        """Write the page; return its path. Raises OSError."""
        files.write_bytes(path, self.page().encode("utf-8", errors="backslashreplace"))
        return path

    def as_dict(self) -> JsonObject:
        """The answer, and the tables by their names, each as a list of rows."""
        return {"answer": self.answer, **{each.name: each.as_dict() for each in self.sections if isinstance(each, Table)}}

    def _repr_html_(self) -> str:
        """The answer and the first table, for notebooks."""
        tables = [each for each in self.sections if isinstance(each, Table)]
        return f"<p><b>{escape(sentence(self.answer))}</b></p>{joined(tables[:1])}"

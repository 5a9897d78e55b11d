"""What pages that are not made of sections yet take from ui/sheet.py, as HTML."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from drivetrain.ui import sheet
from drivetrain.ui.sheet import Part, Sheet, Table


def page(title: str, verdict: str, body: Sequence[str]) -> str:
    """The whole file."""
    return Sheet(title, verdict, [Part("".join(body))]).page()


def heading(text: str, level: int = 2) -> str:
    """A heading of a section."""
    return sheet.heading(text, level).html


def paragraphs(lines: Sequence[str], soft: bool = False) -> list[str]:
    """Each line as a paragraph; `soft`: as a remark."""
    return [(sheet.remarks if soft else sheet.words)(line).html for line in lines]


def command(*lines: str) -> str:
    """Commands to copy."""
    return sheet.commands(*lines).html


def folded(summary: str, content: Sequence[str], is_open: bool = False) -> str:
    """Content that a click shows."""
    return sheet.folded(summary, [Part("".join(content))], is_open).html


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    text: Collection[str] = (),
    sortable: bool = False,
    winner: int | None = None,
    bars: Mapping[str, Sequence[float | None]] | None = None,
    name: str = "a table",
) -> str:
    """A table."""
    return Table(header, rows, name, text, sortable, winner, bars or {}).html


def facts(rows: Sequence[tuple[str, str]], name: str) -> str:
    """A table of names and what they are, without a header."""
    return sheet.facts(rows, name).html

"""Writes CSV. Every cell that this project writes passes here, so that none is a formula: a stranger may have named a class."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

FIRST = tuple("=+-@\t\r\n＝＋－＠")  # what a formula begins with; some spreadsheets take the wide signs too
UNITS = "s|ms|min|h|GiB|MiB|KiB|%|×|J|updates|samples"  # that drivetrain's own tables write
# One number, or one with such a unit, and a row of standard input.
_FIGURE = re.compile(rf"[+-]?(\d[\d,]*\.?\d*(e[+-]?\d+)?|inf|nan)( ({UNITS}))?|-\[\d+\]")


def spreadsheet(cell: object) -> object:
    """A cell for a CSV file: a spreadsheet would run a text that begins like a formula, so an apostrophe makes it text."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FIRST) and not _FIGURE.fullmatch(cell) else cell


def csv_rows(file: SupportsWrite[str]) -> Callable[[Iterable[Iterable[object]]], None]:
    """Return what writes rows to a file, which anything with `write` can be."""
    writer = csv.writer(file, lineterminator="\n")
    return lambda rows: writer.writerows([spreadsheet(cell) for cell in row] for row in rows)

"""Writes CSV. All cells of this project are written here, so that none is a formula: a class may have a stranger's name."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

FIRST = tuple("=+-@\t\r\n＝＋－＠")  # the first characters of a formula; some spreadsheets accept the wide signs too
UNITS = "s|ms|min|h|GiB|MiB|KiB|%|×|J|updates|samples"  # in drivetrain's own tables
# A number, with or without such a unit, or a row of standard input.
_FIGURE = re.compile(rf"[+-]?(\d[\d,]*\.?\d*(e[+-]?\d+)?|inf|nan)( ({UNITS}))?|-\[\d+\]")


def spreadsheet(cell: object) -> object:
    """A cell for a CSV file: an apostrophe before a text that a spreadsheet would run as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FIRST) and not _FIGURE.fullmatch(cell) else cell


def csv_rows(file: SupportsWrite[str]) -> Callable[[Iterable[Iterable[object]]], None]:
    """Return a function that writes rows to a file, or to any object with `write`."""
    writer = csv.writer(file, lineterminator="\n")
    return lambda rows: writer.writerows([spreadsheet(cell) for cell in row] for row in rows)

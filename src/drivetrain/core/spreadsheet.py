"""Text in CSV files that people open in a spreadsheet."""

from __future__ import annotations

import re

FIRST = tuple("=+-@\t\r\n＝＋－＠")  # what a formula begins with; some spreadsheets take the wide signs too
UNITS = "s|ms|min|h|GiB|MiB|KiB|%|×|J|updates|samples"  # that drivetrain's own tables write
_FIGURE = re.compile(rf"[+-]?(\d[\d,]*\.?\d*(e[+-]?\d+)?|inf|nan)( ({UNITS}))?")


def spreadsheet(text: str) -> str:
    """A cell's text for a CSV file: a spreadsheet would run one that begins like a formula, so an apostrophe makes it text.

    One number, or one with a unit of drivetrain's own, is no formula.
    """
    return f"'{text}" if text.startswith(FIRST) and not _FIGURE.fullmatch(text) else text

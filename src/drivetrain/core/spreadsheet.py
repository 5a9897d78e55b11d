"""Text in CSV files that people open in a spreadsheet."""

from __future__ import annotations


def spreadsheet(text: str) -> str:
    """A cell's text for a CSV file: a spreadsheet would run one that begins like a formula, so an apostrophe makes it text."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r", "\n") and not _is_figure(text) else text


def _is_figure(text: str) -> bool:
    try:
        return bool(float(text.split(" ")[0]) or True) and len(text.split(" ")) < 3
    except ValueError:
        return False

"""Values as the text of a table's cells."""

from __future__ import annotations

from typing import Any


def figure(value: float | None, form: str) -> str:
    """A figure in the given format; a dash where there is none."""
    return form.format(value) if value is not None else "–"


def spreadsheet(text: str) -> str:
    """A cell's text for a CSV file: a spreadsheet would run one that begins like a formula, so an apostrophe makes it text."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r", "\n") and not _is_figure(text) else text


def _is_figure(text: str) -> bool:
    try:
        return bool(float(text.split(" ")[0]) or True) and len(text.split(" ")) < 3
    except ValueError:
        return False


def setting(value: Any) -> str:
    """A config value as it would be written in an override; a dash where there is none."""
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

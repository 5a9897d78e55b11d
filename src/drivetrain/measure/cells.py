"""Values as the text of a table's cells."""

from __future__ import annotations

from typing import Any


def figure(value: float | None, form: str) -> str:
    """A figure in the given format; a dash where there is none."""
    return form.format(value) if value is not None else "–"


def setting(value: Any) -> str:
    """A config value as it would be written in an override; a dash where there is none."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

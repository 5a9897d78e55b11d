"""Parameters of which the normal suite runs some, and `make test-slow` all."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def but(kept: Callable[[Any], bool], values: Iterable[Any], name: Callable[[Any], str] | None = None) -> list[Any]:
    """Return `values`, tuples as several arguments; those that are not `kept` are marked slow. `name` gives their ids."""
    found = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        marks = [] if kept(value) else [pytest.mark.slow]
        found.append(pytest.param(*arguments, marks=marks, id=name(value) if name else None))
    return found

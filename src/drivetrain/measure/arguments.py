"""The words of a measuring command that are its own, among those that override the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, get_type_hints

from drivetrain.config.validate import type_problems
from drivetrain.core.errors import UserError
from drivetrain.core.overrides import key_of, single_values

T = TypeVar("T")


def split(words: Sequence[str], kind: type[T]) -> tuple[T, list[str]]:
    """The command's settings, a dataclass whose fields are their names and types, and the words that are left.

    Raises UserError with all that is wrong.
    """
    hints = get_type_hints(kind, include_extras=True)
    problems: list[str] = []
    own = [word for word in words if key_of(word) in hints and "=" in word]
    values = single_values(own, "command", problems)
    problems += type_problems("", {name: (hints[name], value) for name, value in values.items()})
    if problems:
        raise UserError(problems)
    return kind(**values), [word for word in words if word not in own]

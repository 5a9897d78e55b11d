"""Splits a measuring command's arguments into its own settings and the overrides of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, get_type_hints

from drivetrain.config.values import type_problems
from drivetrain.core.errors import UserError
from drivetrain.core.overrides import key_of, single_values

T = TypeVar("T")


def split(arguments: Sequence[str], kind: type[T]) -> tuple[T, list[str]]:
    """Return the command's settings and the remaining arguments, which override the run.

    `kind` is a dataclass: its fields are the names and types of the settings. Raises UserError with every problem found.
    """
    hints = get_type_hints(kind, include_extras=True)
    problems: list[str] = []
    own = [argument for argument in arguments if key_of(argument) in hints and "=" in argument]
    values = single_values(own, "command", problems)
    problems += type_problems("", {name: (hints[name], value) for name, value in values.items()})
    if problems:
        raise UserError(problems)
    return kind(**values), [argument for argument in arguments if argument not in own]

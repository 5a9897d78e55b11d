"""The words of a measuring command that are its own, among those that override the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, get_type_hints

from drivetrain.check import typed
from drivetrain.errors import UserError
from drivetrain.words import key_of, parse

T = TypeVar("T")


def split(words: Sequence[str], kind: type[T]) -> tuple[T, list[str]]:
    """The command's settings, a dataclass whose fields are their names and types, and the words that are left.

    Raises UserError with all that is wrong.
    """
    from hydra.errors import HydraException

    hints = get_type_hints(kind, include_extras=True)
    values: dict[str, Any] = {}
    rest: list[str] = []
    problems: list[str] = []
    for word in words:
        if key_of(word) not in hints or "=" not in word:
            rest.append(word)
            continue
        try:
            override = parse(word)
        except HydraException:
            problems.append(f"{word!r} is not of the form key=value")
            continue
        if override.is_sweep_override():
            problems.append(f"'{word}': {key_of(word)} is the command's own and has one value")
        else:
            values[key_of(word)] = override.value()
    problems += typed("", {name: (hints[name], value) for name, value in values.items()})
    if problems:
        raise UserError(problems)
    return kind(**values), rest

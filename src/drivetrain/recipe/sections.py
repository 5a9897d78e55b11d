"""Data sections of a recipe: dataclasses with a rule for each field's value. One reader, one check, one writer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, Self, TypeGuard, get_args, get_type_hints

from drivetrain.core.errors import did_you_mean, printable
from drivetrain.recipe.safe_yaml import RecipeKey
from drivetrain.recipe.write import flow

MAX_CHARACTERS = 200  # of a text
MAX_ITEMS = 1000  # of a list
MAX_NUMBER = 1e15
SHOWN = 60  # characters of a wrong value in a message

Check = Callable[[object], str]  # the problem of a value, or ""


@dataclass(frozen=True)
class Rule:
    """The rule for the value of a field."""

    check: Check = lambda _: ""
    about: str = ""  # description of the value, for the message if it is missing
    comment: str = ""  # comment after the written value
    kind: type[Section] | None = None  # the value's section, with its own checks

    def read(self, entry: RecipeKey) -> object:
        """The value of an entry; arbitrary if it was refused."""
        if self.kind is not None:
            return self.kind.read(entry)
        before, value = len(entry.problems), entry.value()
        if len(entry.problems) == before and (wrong := self.check(value)):
            entry.refuse(f"{entry.key}={shown(value)}: {wrong}")
        return tuple(value) if isinstance(value, list) else value

    def problems(self, key: str, value: object) -> Iterator[str]:
        """The problems of a value that does not come from a file."""
        if isinstance(value, Section):
            yield from value.problems(key)
        elif wrong := self.check(list(value) if isinstance(value, tuple) else value):
            yield f"{key}={shown(value)}: {wrong}"


def _rules_of(section: type) -> dict[str, Rule]:
    """The rule of each field of a section, by its key in the file."""
    hints = get_type_hints(section, include_extras=True)
    return {each.name: next(r for r in get_args(hints[each.name]) if isinstance(r, Rule)) for each in fields(section)}


rules_of: Callable[[type], dict[str, Rule]] = cache(_rules_of)  # reads the annotations


class Section:
    """A mapping in a recipe: a dataclass with a Rule in each field's Annotated. Fields with a default may be left out."""

    @classmethod
    def read(cls, entry: RecipeKey) -> Self | None:
        """The section below a key; None if it was refused. Every reason is noted with its line."""
        key, before, rules = entry.key, len(entry.problems), rules_of(cls)
        if (given := entry.mapping(", ".join(rules))) is None:
            return None
        found: dict[str, Any] = {}
        for inner in given:
            if inner.key in rules:
                found[inner.key] = rules[inner.key].read(inner.under(key))
            else:
                inner.refuse(f"{key} has no '{shown(inner.key)}': {did_you_mean(inner.key[:SHOWN], rules)}")
        for name in [f.name for f in fields(cls) if f.default is MISSING and f.name not in found]:  # type: ignore[arg-type]
            entry.refuse(f"{key} has no {name}: {rules[name].about}")
        made = cls(**found) if len(entry.problems) == before else None
        for wrong in made.contradictions(key) if made is not None else ():
            entry.refuse(wrong)
        return made if len(entry.problems) == before else None

    def problems(self, key: str) -> Iterator[str]:
        """The problems that a reader would find in this section, for one made by the program."""
        for name, rule in rules_of(type(self)).items():
            if (value := getattr(self, name)) is not None:
                yield from rule.problems(f"{key}.{name}", value)
        yield from self.contradictions(key)

    def contradictions(self, key: str) -> Iterator[str]:
        """The conflicts between individually valid values."""
        return iter(())

    def to_yaml(self, key: str, indent: str = "") -> str:
        """The section as YAML: one line if it is plain, else a line for each value, with its comment."""
        rules = {name: rule for name, rule in rules_of(type(self)).items() if getattr(self, name) is not None}
        values = {name: getattr(self, name) for name in rules}
        if not any(isinstance(value, Section) for value in values.values()) and not any(r.comment for r in rules.values()):
            return f"{indent}{key}: {flow({name: plain(value) for name, value in values.items()})}\n"
        text = f"{indent}{key}:\n"
        for name, value in values.items():
            if isinstance(value, Section):
                text += value.to_yaml(name, f"{indent}  ")
            else:
                line = f"{indent}  {name}: {flow(plain(value))}"
                text += f"{line:<36}  # {comment}\n" if (comment := rules[name].comment) else f"{line}\n"
        return text


def shown(value: object) -> str:
    """An untrusted value for a message: one short line."""
    return printable(str(value))[:SHOWN]


def plain(value: object) -> object:
    """A value in plain types for YAML's writer."""
    return list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, dict) else value


# --- checks ---


def check(good: Callable[[Any], bool], about: str) -> Check:
    """The check that a value is `about`."""
    return lambda value: "" if good(value) else f"must be {about}"


def is_number(value: object) -> TypeGuard[float]:
    """True if a value is a finite number of a plausible size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER  # false for nan


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and is_number(value) and value >= 0


def _is_interval(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_number, value)) and value[0] <= value[1]


def is_text(value: object) -> TypeGuard[str]:
    """True if a text is safe for terminals: without control characters."""
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= MAX_CHARACTERS


number = check(is_number, "a number")
above_0 = check(lambda value: is_number(value) and value > 0, "a number above 0")
at_least_0 = check(lambda value: is_number(value) and value >= 0, "a number of 0 or more")
whole = check(_is_whole, "a whole number of 0 or more")
count = check(lambda value: _is_whole(value) and value >= 1, "a whole number of 1 or more")
interval = check(_is_interval, "[low, high], two numbers")
interval_above_0 = check(lambda value: _is_interval(value) and value[0] > 0, "[low, high], two numbers above 0")
text = check(is_text, f"a text in one line of at most {MAX_CHARACTERS} characters: quote it, if it is one")
texts_by_name = check(
    lambda value: (
        isinstance(value, dict) and len(value) <= MAX_ITEMS and all(is_text(part) for pair in value.items() for part in pair)
    ),
    "a mapping of name → text, as {torch: 2.15.0}: quote what YAML reads as a number",
)
different_numbers = check(
    lambda value: (
        isinstance(value, list) and 0 < len(value) <= MAX_ITEMS and all(map(_is_whole, value)) and len({*value}) == len(value)
    ),
    f"a list of 1 to {MAX_ITEMS} different whole numbers, as [1, 2, 3]",
)


def one_of(*choices: str) -> Check:
    """One of a few words."""
    return check(lambda value: isinstance(value, str) and value in choices, f"one of {', '.join(choices)}")


def like(pattern: str, about: str) -> Check:
    """A text of this form."""
    return check(lambda value: is_text(value) and re.fullmatch(pattern, value) is not None, about)

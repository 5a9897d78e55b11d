"""The texts that a recipe may give. A recipe may be anybody's, so a text from it reaches a library only if a list has it.

A setting's annotation says what its text may be: a Literal, or `Annotated[str, Text(…)]`; for a mapping `Annotated[dict[str,
Any], Entries(…)]`. No recipe can set a value whose annotation is open (a bare `str`, `dict` or `Any`); the command line can.
"""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from drivetrain.core.errors import did_you_mean, refuse

SHOWN = 8  # names in a message


def matches(name: str, pattern: str) -> bool:
    """True if a pattern with * and ? matches a parameter's name, or the name of a module that contains the parameter."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")


def check_patterns(names: Collection[str], patterns: Mapping[str, Collection[str]], what: str = "trainable parameter") -> None:
    """Raise UserError for every pattern that matches no parameter. `patterns` are given by the key that they are set in."""
    refuse(
        f"{key}: {pattern!r} matches no {what} of the model: {_near(pattern, names)}"
        for key, given in patterns.items()
        for pattern in given
        if not any(matches(name, pattern) for name in names)
    )


def _near(pattern: str, names: Collection[str]) -> str:
    """A hint for a pattern: the names of parameters and modules that are similar, or the outermost names of all."""
    modules = {name[:i] for name in names for i, character in enumerate(name) if character == "."}
    if get_close_matches(pattern, {*names, *modules}):
        return did_you_mean(pattern, {*names, *modules})
    outermost = sorted({name.partition(".")[0] for name in names})
    more = f", … ({len(outermost)} in all)" if len(outermost) > SHOWN else ""
    return f"there is: {', '.join(outermost[:SHOWN])}{more}, and their parts, such as {min(names, key=len, default='')}"


def flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """Nested mappings with dotted keys: `{head: {bias: 2}}`, as in a recipe, becomes `{head.bias: 2}`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


LARGEST = 10**6  # a number among a library's arguments
NO_RULE = "a recipe may give it numbers only"


@dataclass(frozen=True)
class Text:
    """A text that a recipe may give: one that matches the regular expression `pattern` as a whole. `what` is for messages."""

    pattern: str
    what: str

    def takes(self, value: str) -> bool:
        """True if a recipe may give this text."""
        return re.fullmatch(self.pattern, value) is not None


def one_of(*names: str) -> Text:
    """A text among these names."""
    return Text("|".join(map(re.escape, names)), f"one of {', '.join(names)}")


@dataclass(frozen=True)
class Entries:
    """The entries that a mapping in a recipe may have: numbers, true, false, null and lists of these, under names of `names`.

    An entry of an inner mapping has a dotted name. `texts` lists the entries that may be a text, and their texts.
    """

    names: Text
    texts: tuple[tuple[Text, Text], ...] = ()  # (names of entries, their texts)

    def problem(self, name: str, value: object) -> str:
        """The reason why a recipe may not have this entry; "" where it may."""
        if not self.names.takes(name):
            return f"'{name}' is not {self.names.what}"
        texts = [text for names, text in self.texts if names.takes(name)]
        for part in _parts(value):
            if isinstance(part, dict):
                return "it must not be a mapping"
            if isinstance(part, str) and not any(text.takes(part) for text in texts):
                return f"it must be {' or '.join([*(text.what for text in texts), 'a number'])}"
            if isinstance(part, int | float) and not abs(part) <= LARGEST:
                return f"it must lie between {-LARGEST} and {LARGEST}"
        return ""


class _Name(Text):
    """A text of a Literal: its type refuses all other texts."""


class _Open:
    """A part of an annotation that takes texts or mappings without a rule."""


OPEN = _Open()


def rules(hint: object) -> Iterator[Text | Entries | _Open]:
    """The rules of an annotation for texts and mappings; OPEN for each part without a rule."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        marks = [mark for mark in parts[1:] if isinstance(mark, Text | Entries)]
        yield from marks or rules(parts[0])
    elif origin is Literal:
        yield from (_Name(re.escape(name), name) for name in parts if isinstance(name, str))
    elif origin in (Union, types.UnionType) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        yield from (rule for part in parts if part is not ... for rule in rules(part))
    elif hint not in (bool, int, float, None, type(None)):
        yield OPEN


def problem(hint: object, value: Any, entry: str = "") -> str:
    """The reason why a recipe may not give this value to a setting of this annotation, or "".

    It is also "" where the type is wrong anyway. For one entry of a mapping `entry` is its dotted name within the setting.
    """
    if not entry and (value is None or isinstance(value, int | float)):
        return ""
    known = list(rules(hint))
    texts = [rule for rule in known if isinstance(rule, Text)]
    if entry or isinstance(value, dict):
        entries = [rule for rule in known if isinstance(rule, Entries)]
        given = flatten({entry: value} if entry else value)
        wrong = (rule.problem(name, part) for rule in entries for name, part in given.items())
        return next(filter(None, wrong), NO_RULE if OPEN in known and given and not entries else "")
    for part in _parts(value):
        if isinstance(part, str | dict) and OPEN in known:
            return NO_RULE
        if isinstance(part, str) and any(type(text) is Text for text in texts) and not any(text.takes(part) for text in texts):
            return f"it must be {' or '.join(text.what for text in texts)}"
    return ""


def _parts(value: object) -> Iterator[object]:
    """The elements of a list and of lists in it; any other value itself."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value


# The kinds of texts of the options' settings.
PLAIN_NAME = Text(r"[A-Za-z_]\w{0,99}", "a plain name")
NAME_PATTERN = Text(r"[\w.*?\[\]!-]{1,200}", "a parameter's or module's name, with * and ? for any letters")
EPOCHS = Text(r"\d{1,9}(\.\d{1,9})?ep", "a number of epochs such as 5ep")
# Below 1: a share of the run; a whole number: updates; "5ep": epochs (read by horizon.Horizon).
Length = float | Annotated[str, EPOCHS]
FILE_NAME = Text(r"\w[\w.-]{0,99}", "a plain name of a file or folder next to the data, not a path")

Name = Annotated[str, PLAIN_NAME]  # of a metric, a split, a class of modules
FigureName = Annotated[str, Text(r"([A-Za-z_]\w{0,99}/)?[A-Za-z_]\w{0,99}", "a metric's name, such as f1 or noisy/f1")]
NamePattern = Annotated[str, NAME_PATTERN]  # of parameters and modules
ColumnName = Annotated[str, Text(r"\w[^/\\:\x00-\x1f\x7f-\x9f\u2028\u2029]{0,99}", "a column's name without / \\ and :")]
FileName = Annotated[str, FILE_NAME]
# Arguments of code that the operator trusts: plain ones. Only the operator gives paths and addresses.
Arguments = Annotated[
    dict[str, Any],
    Entries(Text(r"[A-Za-z]\w*(\.\w+)*", "the name of an argument"), ((Text(r".*", ""), PLAIN_NAME),)),
]

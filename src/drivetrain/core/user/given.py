"""Objects that a program passes to `drivetrain.train` for settings that take the dotted name of a class or function."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from numbers import Number
from pathlib import Path

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options.overrides import format_value, key_of, parse

PACKAGE = "given"  # stands before the names of objects that cannot be imported
PLAIN = (str, Number, type(None), Path)

_held: dict[str, object] = {}  # kept while the program lives: its runs may be loaded and resumed


def find(name: str) -> object:
    """Return the given object of a name. Raises ImportError in another program."""
    if name not in _held:
        raise ImportError("it was an object of the program that started the run, and only that program can build it")
    return _held[name]


def objects_in(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that name given objects."""
    return [word for word in overrides if f"{PACKAGE}." in word.partition("=")[2]]


def words(overrides: Sequence[str], keywords: Mapping[str, object]) -> tuple[Sequence[str], dict[str, object]]:
    """The overrides and keywords, with names instead of objects, and trust in the objects' packages. Raises UserError."""
    if isinstance(overrides, str):  # `words_of` refuses it
        return overrides, dict(keywords)
    settings: dict[str, object] = {}
    for key, value in keywords.items():
        if is_plain(value):
            settings[key] = value
        elif key in _SETTINGS:
            settings |= _SETTINGS[key](value)
        else:
            raise UserError(
                f"{key} takes no object ({_plain_name(value)}), but a name, as {key}=NAME: {', '.join(_SETTINGS)} take objects"
            )
    packages = set()

    def named(value: object) -> object:
        if isinstance(value, list):
            return [named(each) for each in value]
        if is_plain(value):
            return value
        packages.add((name := _name_of(value)).partition(".")[0])
        return name

    plain = {key: value if is_plain(value) else named(value) for key, value in settings.items()}
    if packages := packages - {PACKAGE}:
        said = [word for word in overrides if key_of(word) == "trust"]
        trusted = [parse(word).value() for word in (*said, f"trust={_text(plain.get('trust', []))}")]
        plain["trust"] = sorted(packages.union(*trusted))
        overrides = [word for word in overrides if word not in said]
    return [*overrides], plain


def _text(value: object) -> str:
    return value if isinstance(value, str) else format_value(value)


def is_plain(value: object) -> bool:
    """True if a value can be written as an override."""
    if isinstance(value, Mapping):
        return all(map(is_plain, value.values()))
    return isinstance(value, PLAIN) or (isinstance(value, Sequence) and all(map(is_plain, value)))


def _model(value: object) -> dict[str, object]:
    """A module is copied in its present state; the caller's does not change."""
    if not isinstance(value, torch.nn.Module):
        return {"model": "own", "model.target": value}
    kept = copy.deepcopy(value)

    def model() -> torch.nn.Module:
        return copy.deepcopy(kept)

    model.__name__ = type(value).__name__
    return {"model": "own", "model.target": model}


def _loss(value: object) -> dict[str, object]:
    return {"loss": "own", "loss.target": copy.deepcopy(value)}


def _data(value: object) -> dict[str, object]:
    """Of two sets the second is the test set, which then also selects."""
    if isinstance(value, type) or inspect.isroutine(value):
        return {"data": "own", "data.target": value}
    if not isinstance(value, tuple | list) or not 2 <= len(value) <= 3:
        raise UserError(
            "data takes (training set, test set), (training, validation, test), or a class or function that makes them"
        )
    sets = dict(zip(("train", "validation", "test") if len(value) == 3 else ("train", "test"), value, strict=True))

    def data(split: str) -> object:
        return sets[split]

    return {"data": "own", "data.target": data, "data.validation": "validation" if len(value) == 3 else None}


def _metrics(value: object) -> dict[str, object]:
    """Several functions are one metric with several figures."""
    value = value if isinstance(value, list | tuple) else [value]
    shipped, own = [each for each in value if isinstance(each, str)], [each for each in value if callable(each)]
    if odd := [type(each).__name__ for each in value if not isinstance(each, str) and not callable(each)]:
        raise UserError(f"metrics takes names, functions, classes and callable objects, not {', '.join(odd)}")
    if len(own) == 1 and (isinstance(own[0], type) or inspect.isroutine(own[0])):
        return {"metrics": [*shipped, "own"], "metrics.own.target": own[0]}
    if classes := [each.__name__ for each in own if isinstance(each, type)]:
        raise UserError(f"metrics takes one class, or functions and objects: make it an object, as {classes[0]}()")

    def metrics(output: object, target: object) -> dict[str, object]:
        return {_plain_name(each): copy.deepcopy(each)(output, target) for each in own}  # an object would add up

    return {"metrics": [*shipped, "own"], "metrics.own.target": metrics}


def _callbacks(value: object) -> dict[str, object]:
    return {"callbacks": [*value] if isinstance(value, list | tuple) else [value]}


_SETTINGS: Mapping[str, Callable[[object], dict[str, object]]] = {
    "model": _model, "loss": _loss, "data": _data, "metrics": _metrics, "callbacks": _callbacks,
}  # fmt: skip


def _name_of(value: object) -> str:
    """The dotted name of an object: its own if that name leads to it, else a new one under which it is kept."""
    name = _plain_name(value)
    module = getattr(value, "__module__", "__main__")
    if module != "__main__" and getattr(sys.modules.get(module), name, None) is value:
        return f"{module}.{name}"
    for number in count(1):
        dotted = f"{PACKAGE}.{name}" + (f"_{number}" if number > 1 else "")
        if _held.setdefault(dotted, value) is value:
            return dotted
    raise AssertionError


def _plain_name(value: object) -> str:
    return re.sub(r"\W", "", getattr(value, "__name__", type(value).__name__))

"""The schema of a constructor: one for each class, made from its signature at its first use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from drivetrain.core.typed import JsonObject
from drivetrain.recipe.safe_yaml import MAX_WHOLE

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_REASONS = {  # pydantic's error types
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a text",
    "list_type": "must be a list",
    "is_instance_of": "must be a list",
    "sequence_str": "must be a list",
    "dict_type": "must be a mapping",
    "none_required": "null",
    "finite_number": "must be finite",
    "too_short": "must not be empty",
}
_LIMITS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}

Where = Callable[[str], str]  # key → "file:line: " of the recipe that set it, or ""


def nowhere(key: str) -> str:
    return ""


class Schema:
    """The settings of a constructor, by name and annotation: it checks values and parses texts, by pydantic."""

    def __init__(self, owner: str, hints: Mapping[str, object]) -> None:
        self.owner, self.hints = owner, hints
        self._adapter = cache(self._made)

    def _made(self, key: str) -> TypeAdapter[Any]:
        from pydantic import ConfigDict, TypeAdapter

        hint: Any = self.hints[key]
        return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True))

    def check(
        self, prefix: str, given: Mapping[str, object], where: Where = nowhere, texts: Container[str] = ()
    ) -> tuple[JsonObject, dict[str, str]]:
        """The values; and key → problem for each unknown key or wrong value.

        Checked strictly: "1" is no number. Values of the keys `texts` are from the environment, and are parsed as their keys'
        types.
        """
        values, wrong = dict(given), dict[str, str]()
        for key, value in given.items():
            name = f"{prefix}.{key}" if prefix else key
            problem = f": {self.owner} takes no such argument"
            if key in self.hints:
                values[key], problem = self._read(key, value, as_text=key in texts)
            if problem:
                wrong[key] = f"{where(name)}{name}{problem}"
        return values, wrong

    def _read(self, key: str, value: Any, as_text: bool) -> tuple[Any, str]:
        """The value, parsed if it is a text, and the end of the message about its problem."""
        from pydantic import ValidationError

        hint, problem = self.hints[key], ""
        try:
            found = self._adapter(key).validate_python(value, strict=not as_text)
            value = found if as_text else value
        except ValidationError as error:
            text = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
            problem = f"={text}: {_reason(error.errors(), nullable=type(None) in get_args(hint))}"
        if hint is not Any and _is_too_large(value):  # no library takes it
            return value, ": a whole number must be below 2^63"
        return value, problem

    def problems(self, prefix: str, given: Mapping[str, object]) -> list[str]:
        """The problems of these values, one line each."""
        return [*self.check(prefix, given)[1].values()]


def of(cls: object) -> Schema:
    """The schema of a constructor. A dataclass's fields are annotated in its own module and in those of its base classes."""
    return _of(cls)


@cache
def _of(cls: Any) -> Schema:
    owner: Any = next(c for c in cls.__mro__ if "__init__" in vars(c))
    names, found = inspect.signature(cls).parameters, {}
    if "__dataclass_fields__" not in vars(owner):
        found = get_type_hints(owner.__init__, include_extras=True)
    for base in reversed(cls.__mro__) if not found else ():  # annotations of anything but fields may need torch
        own = {name: hint for name, hint in vars(base).get("__annotations__", {}).items() if name in names}
        if "__dataclass_fields__" in vars(base):
            fields = type(base.__name__, (), {"__annotations__": own, "__module__": base.__module__})
            found |= get_type_hints(fields, include_extras=True)
    return Schema(cls.__name__, {name: found.get(name, Any) for name in names})


def _is_too_large(value: object) -> bool:
    return any(map(_is_too_large, value)) if isinstance(value, list) else isinstance(value, int) and abs(value) > MAX_WHOLE


def _reason(errors: Iterable[Any], nullable: bool) -> str:
    """The rule for a value, as one phrase. pydantic leaves out that a value may be null."""
    reasons = []
    for error in errors:
        limit = next((f"must be {_LIMITS[k]} {v}" for k, v in error.get("ctx", {}).items() if k in _LIMITS), None)
        reason = _REASONS.get(error["type"])
        if error["type"] == "too_long":
            reason = f"must be a list of at most {error['ctx']['max_length']}"
        if error["type"] == "literal_error":
            expected = error["ctx"]["expected"]
            reason = f"must be {'one of ' if ',' in expected or ' or ' in expected else ''}{expected}"
        reasons.append(limit or reason or error["msg"])
    if nullable and not any(reason in (_REASONS["none_required"], _REASONS["too_short"]) for reason in reasons):
        reasons.append("must be null")
    first, *others = dict.fromkeys(reasons)
    *middle, last = [first, *(reason.removeprefix("must be ") for reason in others)]
    return f"{', '.join(middle)} or {last}" if middle else last

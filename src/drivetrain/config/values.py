"""Checking values against annotations, and saying what a value must be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, get_args

from drivetrain.recipe.safe_yaml import MAX_WHOLE

_REASONS = {  # pydantic's error types
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false",
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


def type_problems(prefix: str, given: dict[str, tuple[Any, Any]], where: Where = nowhere) -> Iterator[str]:
    """Key → (annotation, value): each value that its annotation excludes. Checked by pydantic, strictly: "1" is no number."""
    from pydantic import ValidationError

    for key, (hint, value) in given.items():
        if hint is Any:
            continue
        name = f"{prefix}.{key}" if prefix else key
        if _is_too_large(value):  # no library takes it, and Python makes no float of it
            yield f"{where(name)}{name}: a whole number must be below 2^63"
            continue
        try:
            _adapter(hint).validate_python(value)
        except ValidationError as error:
            text = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
            yield f"{where(name)}{name}={text}: {_reason(error.errors(), nullable=type(None) in get_args(hint))}"


@lru_cache(maxsize=1024)  # making one takes longer than checking a value
def _adapter(hint: Any) -> Any:
    """pydantic's check of an annotation, strictly."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True))


def _is_too_large(value: Any) -> bool:
    return any(map(_is_too_large, value)) if isinstance(value, list) else isinstance(value, int) and abs(value) > MAX_WHOLE


def _reason(errors: Iterable[Any], nullable: bool) -> str:
    """What a value must be, as one phrase. pydantic does not say that a value may be null."""
    reasons = []
    for error in errors:
        limit = next((f"must be {_LIMITS[k]} {v}" for k, v in error.get("ctx", {}).items() if k in _LIMITS), None)
        reason = _REASONS.get(error["type"])
        if error["type"] == "literal_error":
            expected = error["ctx"]["expected"]
            reason = f"must be {'one of ' if ',' in expected or ' or ' in expected else ''}{expected}"
        reasons.append(limit or reason or error["msg"])
    if nullable and not any(reason in (_REASONS["none_required"], _REASONS["too_short"]) for reason in reasons):
        reasons.append("must be null")
    first, *others = dict.fromkeys(reasons)
    *middle, last = [first, *(reason.removeprefix("must be ") for reason in others)]
    return f"{', '.join(middle)} or {last}" if middle else last


def references(config: Any, prefix: str = "") -> dict[str, str]:
    """Dotted key → text of every value that refers to another, to the environment, or to anything else."""
    items = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    found: dict[str, str] = {}
    for key, value in items:
        name = f"{prefix}{key}" if isinstance(config, dict) else f"{prefix[:-1]}[{key}]"
        found |= {name: value} if isinstance(value, str) and "${" in value else references(value, f"{name}.")
    return found

"""Names for values of any type, and checks that a value read from a file has the type that the program wrote."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, Protocol, TypeAlias, TypeGuard, Union, get_args, get_origin

StateDict: TypeAlias = dict[str, Any]  # returned by `state_dict()` of a part: tensors and plain values, in dicts and lists
JsonObject: TypeAlias = dict[str, Any]  # an object of a JSON document
JsonMapping: TypeAlias = Mapping[str, Any]  # a read-only one, such as a record of a run

LARGEST = 2**1000


def fits(value: object, kind: Any) -> bool:
    """True if a value of JSON has an annotation's type. A number must fit into a float, as NaN does."""
    origin = get_origin(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in get_args(kind))
    if origin is list:
        return isinstance(value, list) and all(fits(item, get_args(kind)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, get_args(kind)[1]) for item in value.values())
    if kind in (int, float):
        return is_number(value) and (kind is float or isinstance(value, int))
    return isinstance(value, kind)


def is_number(value: object) -> TypeGuard[float]:
    """True if a value is a number that fits into a float."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST)


def is_table(value: object) -> bool:
    """True if a value is an evaluation's table: names of rows and columns, and a number for each pair."""
    if not (isinstance(value, dict) and fits({k: value.get(k) for k in ("rows", "columns")}, dict[str, list[str]])):
        return False
    lines: Any = value.get("values")
    good = fits(lines, list[list[float]]) and len(lines) == len(value["rows"]) > 0
    return good and all(len(line) == len(value["columns"]) for line in lines)


class Stateful(Protocol):
    """An object that has a state."""

    def state_dict(self) -> Any:
        """Return it."""

    def load_state_dict(self, state: StateDict, /) -> object:
        """Load it."""

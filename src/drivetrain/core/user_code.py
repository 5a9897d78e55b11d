"""Code of the user's: the class or function that a setting names by its dotted name, of a package listed in `trust`."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any

from drivetrain.core.errors import UserError


def trust_problems(setting: str, name: str, trusted: Collection[str]) -> Iterator[str]:
    """Yield the problem if the package of `name` is not among the trusted ones. Nothing is imported."""
    package = name.partition(".")[0]
    if package not in trusted:
        yield f"{setting} is code that drivetrain does not ship: if you trust it, set trust=[{package}] on the command line"


def import_name(name: str) -> Any:
    """Return what the dotted name stands for. Raises ImportError, AttributeError or ValueError."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def load(setting: str, name: str) -> Any:
    """Import the class or function `name`; `setting` (such as model.target=my_pkg.Net) begins the messages. Raises UserError."""
    try:
        found = import_name(name)
    except (ImportError, AttributeError, ValueError, RecursionError) as error:
        raise UserError(f"{setting} cannot be imported: {error}") from None
    if not callable(found):
        raise UserError(f"{setting} is {type(found).__name__}: name a class or a function")
    return found


def make(setting: str, target: Any, kwargs: Mapping[str, Any], offered: Mapping[str, Any] | None = None) -> Any:
    """Call `target` with `kwargs`, and with those of `offered` that it has a parameter for. Raises UserError."""
    parameters = inspect.signature(target).parameters if offered else ()
    arguments = {**{name: value for name, value in (offered or {}).items() if name in parameters}, **kwargs}
    try:
        return target(**arguments)
    except TypeError as error:
        raise UserError(f"{setting} cannot be built with {sorted(arguments)}: {error}") from None

"""Code of the user's: the class or function that a setting names by its dotted name, of a package listed in `trust`."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.user import given


def trust_problems(setting: str, name: str, trusted: Collection[str]) -> Iterator[str]:
    """Yield the problem if the package of `name` is not among the trusted ones. Nothing is imported."""
    package = name.partition(".")[0]
    if package not in trusted and package != given.PACKAGE:
        yield f"{setting} is code that drivetrain does not ship: if you trust it, set trust=[{package}] on the command line"


def import_name(name: str) -> Any:
    """Return what the dotted name stands for. Raises ImportError, AttributeError or ValueError."""
    if name.startswith(f"{given.PACKAGE}."):
        return given.find(name)
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


READING = "while reading "  # the beginning of a note that an error has got which a sample raised


def place_of(error: BaseException) -> str:
    """Return the last line of the user's own code that an error came through, as "file:line: text"; "" where there is none."""
    shipped = (str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(shipped)]
    own = [frame for frame in frames if not {"site-packages", "dist-packages"} & {*Path(frame.filename).parts}]
    if not own:
        return ""
    file = Path(own[-1].filename)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{shown}:{own[-1].lineno}: {own[-1].line}"


def make(
    setting: str, target: Callable[..., Any], kwargs: Mapping[str, object], offered: Mapping[str, object] | None = None
) -> Any:
    """Call `target` with `kwargs`, and with those of `offered` that it has a parameter for. Raises UserError."""
    parameters = inspect.signature(target).parameters if offered else ()
    arguments = {**{name: value for name, value in (offered or {}).items() if name in parameters}, **kwargs}
    try:
        return target(**arguments)
    except TypeError as error:
        raise UserError(f"{setting} cannot be built with {sorted(arguments)}: {error}") from None

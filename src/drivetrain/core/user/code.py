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
    """Return the object of a dotted name. Raises ImportError, also for what a module raises, AttributeError or ValueError."""
    if name.startswith(f"{given.PACKAGE}."):
        return given.find(name)
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        raise
    except (Exception, SystemExit) as error:
        raise ImportError(told(error)) from error


def load(setting: str, name: str) -> Any:
    """Import the class or function `name`; `setting` (such as model.target=my_pkg.Net) begins the messages. Raises UserError."""
    try:
        found = import_name(name)
    except (ImportError, AttributeError, ValueError, RecursionError) as error:
        raise UserError(f"{setting} cannot be imported: {error}") from None
    if not callable(found):
        raise UserError(f"{setting} is {type(found).__name__}: name a class or a function")
    return found


SHOWN, LONGEST = 5, 300  # lines of an error that announces them, and their characters
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


def told(error: BaseException) -> str:
    """Return an error in one line: where in the user's own code it came up, its type and its message."""
    place = place_of(error)
    return f"{place and place + ': '}{type(error).__name__}: {first_lines(error)}"


def first_lines(error: BaseException) -> str:
    """The message of an error in one line: its first line, and those after it where that one only announces them."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or [""]
    if lines[0].startswith("Caught ") and lines[0].endswith("."):  # in a worker process of torch's, whose traceback follows
        noted = lines[-1].startswith(READING)
        return f"{lines[0][:-1]}: {lines[-2]} ({lines[-1]})" if noted else f"{lines[0][:-1]}: {lines[-1]}"
    lines[0] += "".join(f" ({note})" for note in getattr(error, "__notes__", ()) if note.startswith(READING))
    if not lines[0].endswith(":") or len(lines) == 1:
        return lines[0]
    shown = [line if len(line) <= LONGEST else f"{line[:LONGEST]} …" for line in lines[: SHOWN + 1]]
    more = f" … and {len(lines) - len(shown)} more" if len(lines) > len(shown) else ""
    return " ".join([shown[0], "; ".join(shown[1:])]) + more


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

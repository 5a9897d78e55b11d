"""Printing. All printed text passes `plain`, so that no input file can command the terminal.

Most printed lines contain text from outside: keys and values of recipes, class names, file names, errors of a run. An
escape sequence in it could hide a line, rename the window or forge a result.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from drivetrain.core.errors import UserError, printable, without_logins

if TYPE_CHECKING:
    from rich.console import Console

PLAIN = "DRIVETRAIN_PLAIN"  # the environment variable that --plain sets, for the ranks too
# Control characters except tab and newline, text direction marks, invisible tags, lone surrogates.
_UNSEEN = re.compile(
    "\r\n|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


def plain(text: str) -> str:
    """Return a text without logins and with escaped control characters, such as \\x1b. Newlines stay."""
    text = without_logins(text)
    return _UNSEEN.sub(lambda found: "\n" if found[0] == "\r\n" else found[0].encode("unicode_escape").decode(), text)


def notices() -> TextIO:
    """The stream for notices: the real standard error, or standard output in a notebook, which shows standard error in red.

    While rich draws, it replaces standard error by its own stream, even if standard error is a file.
    """
    stream: TextIO = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return sys.stdout if type(stream).__module__.startswith("ipykernel") else stream


def can_redraw(stream: Any) -> bool:
    """True if a stream is a terminal for frames, colours and live lines: not with TERM=dumb, and not with `--plain`."""
    return bool(stream.isatty()) and os.environ.get("TERM") not in ("dumb", "unknown") and PLAIN not in os.environ


def fold(text: str) -> str:
    """Fold the lines of a help text that are wider than the terminal, indented to the column of their last part."""
    if not can_redraw(sys.stdout):
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(part for line in text.split("\n") for part in _folded(line, width))


def _folded(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    columns = [found.end() for found in re.finditer(r"(?<=\S)  +(?=\S)|^ +", line)]
    below = max((column for column in columns if column <= width - 24), default=0)
    first, rest = line[:below], line[below:]
    parts = textwrap.wrap(rest, width - below, break_long_words=False, break_on_hyphens=False)
    return [(first if n == 0 else " " * below) + part for n, part in enumerate(parts)]


def echo(text: object = "", end: str = "\n", file: TextIO | None = None) -> None:
    """Print a text on standard output, or on `file`, at once."""
    print(plain(str(text)), end=end, file=file, flush=True)


def echo_traceback(error: BaseException, file: TextIO | None = None) -> None:
    """Print an exception with its traceback on standard error, or on `file`."""
    echo("".join(traceback.format_exception(error)), end="", file=file or sys.stderr)


@contextmanager
def writing(place: object) -> Iterator[None]:
    """Within the context, turn a failed write into a UserError that names the place."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{place} cannot be written: {error.strerror or error}") from None


class PlainStream:
    """Standard output as a file object, for instance for a CSV writer."""

    def write(self, text: str) -> None:
        echo(text, end="")

    def flush(self) -> None:
        """Do nothing: each text is shown at once."""


def warn_plainly() -> None:
    """Pass Python's warnings through `plain` as well: libraries put file names and values into them."""

    def show_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = warnings.formatwarning(str(message), category, filename, lineno, line)
        if file is not None or sys.stderr is not None:
            echo(text, end="", file=file or sys.stderr)

    warnings.showwarning = show_warning


def console(**settings: Any) -> Console:
    """Return a rich console that passes texts through `plain` and reads no markup in them. Only the program sets colours."""
    return _console_class()(markup=False, emoji=False, **settings)


@functools.cache
def _console_class() -> type[Console]:
    """Define the class on first use, because rich takes time to import."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class PlainConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else plain(text), style, control)

    return PlainConsole


MOST_LINES = 200


def show(address: str, content: bytes) -> None:
    """Print the content of an address to standard error, without characters that could steer a terminal."""
    echo(f"fetched {address}, {len(content):,} bytes:", file=sys.stderr)
    lines = text(content).splitlines()
    for line in lines[:MOST_LINES]:
        echo(f"  {line}".rstrip(), file=sys.stderr)
    if len(lines) > MOST_LINES:
        echo(f"  … and {len(lines) - MOST_LINES:,} more lines: drivetrain recipe show {address}", file=sys.stderr)


def text(content: bytes) -> str:
    """Bytes as text with only printable characters in its lines."""
    return "\n".join(printable(line) for line in content.decode(errors="replace").splitlines())

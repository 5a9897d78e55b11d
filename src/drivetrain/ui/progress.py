"""The status of a long measurement: one line that is overwritten in a terminal, a line for each step elsewhere."""

from __future__ import annotations

import sys
import time

from drivetrain.ui import output
from drivetrain.ui.terminal import duration

LINE_EVERY_S = 10.0  # without a terminal
_CLEAR = "\r\x1b[2K"


class Steps:
    """A context manager; call its value with a text for the current work.

    It starts no thread, because measuring forks the process.
    """

    def __enter__(self) -> Steps:
        self._began = time.monotonic()
        self._live = output.can_redraw(sys.stderr)
        return self

    def __call__(self, text: str, left: float | None = None) -> None:
        """Show the current work, and the approximate seconds `left`."""
        after = f", about {duration(left)} left" if left else ""
        line = output.plain(f"{text} ({duration(time.monotonic() - self._began)}{after})")
        print(_CLEAR + line if self._live else line, end="" if self._live else "\n", file=output.notices(), flush=True)

    def __exit__(self, *_: object) -> None:
        if self._live:
            print(_CLEAR, end="", file=sys.stderr, flush=True)


class Rate:
    """A context manager for many equal pieces of work, on standard error: a bar with the rate in a terminal, else lines."""

    def __init__(self, what: str, total: int | None, done: int = 0, which: str = "") -> None:
        self._what, self._which, self._total, self._first, self._done = what, which, total, done, done

    def __enter__(self) -> Rate:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = output.console(stderr=True)
        columns = (BarColumn(bar_width=20), TextColumn("{task.fields[text]}", markup=False), TimeRemainingColumn())
        hidden = not output.can_redraw(sys.stderr)
        self._bar = Progress(*columns, console=console, transient=True, disable=hidden, refresh_per_second=4)
        self._task = self._bar.add_task(self._what, total=self._total, text="")
        self._bar.start()
        self._began = self._printed = time.monotonic()
        return self

    def __call__(self, done: int) -> None:
        """Show the number done."""
        self._done = done
        if self._bar.disable and time.monotonic() - self._printed > LINE_EVERY_S:
            self._printed = time.monotonic()
            output.echo(self.text(), file=sys.stderr)
        self._bar.update(self._task, completed=done, text=self.text())

    def text(self) -> str:
        """The number done, and the rate per second."""
        of = f" of {self._total:,}" if self._total is not None and self._done < self._total else ""
        rate = (self._done - self._first) / max(time.monotonic() - self._began, 1e-9)
        return f"{self._done:,}{of} {self._what}{'s' * (of != '' or self._done != 1)}{self._which}, {rate:,.0f}/s"

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

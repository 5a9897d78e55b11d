"""The status of a long measurement: one line that is overwritten in a terminal, a line for each step elsewhere."""

from __future__ import annotations

import sys
import time

_CLEAR = "\r\x1b[2K"


class Steps:
    """A context manager; call its value with what is being done now. It starts no thread, since measuring forks the process."""

    def __enter__(self) -> Steps:
        self._began = time.monotonic()
        self._live = sys.stderr.isatty()
        return self

    def __call__(self, text: str, left: float | None = None) -> None:
        """Show what is being done, and about how many seconds are `left`."""
        after = f", about {_duration(left)} left" if left else ""
        line = f"{text} ({_duration(time.monotonic() - self._began)}{after})"
        print(_CLEAR + line if self._live else line, end="" if self._live else "\n", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._live:
            print(_CLEAR, end="", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"

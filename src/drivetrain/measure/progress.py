"""Where long measuring stands: one live line in a terminal, a line a step elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any


class Steps:
    """A context whose value is called with what is done now."""

    def __enter__(self) -> Steps:
        self._began = time.monotonic()
        self._status: Any = None
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status("")
            self._status.start()
        return self

    def __call__(self, text: str, left: float | None = None) -> None:
        """Say what is done now, and how many seconds are left, where that is known."""
        after = f", about {_duration(left)} left" if left else ""
        line = f"{text} ({_duration(time.monotonic() - self._began)}{after})"
        if self._status is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._status.update(line)

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"

"""This process: when it started, and which drivetrain it runs."""

from __future__ import annotations

import time
from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).resolve().parents[1]
started = time.time()  # `time_to_first_step_s` counts from here; forked ranks inherit it


def restart_clock() -> None:
    """From here on `started` is now: a forked process begins a run of its own."""
    global started
    started = time.time()

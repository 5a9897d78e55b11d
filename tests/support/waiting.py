"""Waiting for an event, however busy the machine is: under one limit, which is reached only where the event never comes."""

import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 240.0  # pytest ends a test after 300 s
T = TypeVar("T")


def until(happened: Callable[[], T], otherwise: Callable[[], object] = lambda: "it never happened") -> T:
    """Return what `happened()` gives as soon as it is true."""
    end = time.monotonic() + LIMIT_S
    while not (found := happened()):
        assert time.monotonic() < end, otherwise()
        time.sleep(0.01)
    return found

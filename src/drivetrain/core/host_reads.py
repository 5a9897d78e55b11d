"""Marks functions that wait for the device on purpose, so that debug=host_sync does not report them."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

ON_PURPOSE: set[CodeType] = set()


def reads_device_on_purpose(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function, such as the one that logs, whose reads from the device (and its callees') are intended."""
    ON_PURPOSE.add(function.__code__)
    return function

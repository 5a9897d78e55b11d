"""Cores that a step leaves unused: what it would gain by as many threads as there are cores."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from drivetrain.core.cpus import usable_cores
from drivetrain.measure.profile.sites import user_line

MIN_PAIRS = 3  # of updates as they are and with all cores


class Threads(NamedTuple):
    """The threads that torch computes with."""

    number: int
    cores: int
    share: float = 0.0  # of an update's time that is gained with one thread for each core
    place: str | None = None  # file:line of the user's own that sets their number in the step


def measure(update: Callable[[], None], seconds: float) -> Threads:
    """Run updates as they are and, where they leave cores unused, in turns with a thread for each core."""
    place: list[str] = []
    with _replaced(lambda number: place.append(user_line(sys._getframe(1)) or "")):
        update()
    update()  # as it is: it may set the number itself
    number, cores = torch.get_num_threads(), usable_cores()
    if number >= cores:
        return Threads(number, cores)
    ratios: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(ratios) < MIN_PAIRS:
        torch.set_num_threads(number)
        as_is = _seconds(update)
        torch.set_num_threads(cores)
        with _replaced(lambda _: None):
            ratios.append(_seconds(update) / as_is)
    torch.set_num_threads(number)
    return Threads(number, cores, max(0.0, 1 - statistics.median(ratios)), next(filter(None, place), None))


def _seconds(update: Callable[[], None]) -> float:
    update()  # the first one starts the threads
    began = time.perf_counter()
    update()
    return time.perf_counter() - began


@contextmanager
def _replaced(function: Callable[[int], None]) -> Iterator[None]:
    """Have code that sets the number of threads call `function` instead."""
    before = torch.set_num_threads
    torch.set_num_threads = function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.set_num_threads = before

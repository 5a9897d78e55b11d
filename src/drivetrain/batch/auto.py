"""Finds the micro-batch that fits into memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from drivetrain.batch.base import Batch
from drivetrain.core.errors import UserError
from drivetrain.core.option import Positive, RunSpec
from drivetrain.core.protocols import Trials

SEARCH_FACTOR = 1.1  # the largest micro-batch is found to within this factor

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Auto(Batch):
    """Finds the largest micro-batch that fits by trial before the run; gradient accumulation keeps the global batch.

    Trials begin at the size that is forecast to fit, and decide. Each is a process of its own, which may run out of memory. A CPU
    has no memory limit: set `memory_gb`.
    """

    effect = "close"
    changes = "gradients are summed by micro-batches, of which BatchNorm takes its statistics"
    fixed_micro_batches: ClassVar[bool] = False
    takes_tokens: ClassVar[bool] = False
    untried = "batch=accumulate"

    memory_gb: Positive | None = None

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if run.runtime.device_type() == "cpu" and self.memory_gb is None:
            yield "batch=auto on a CPU needs a limit: set batch.memory_gb to what a rank may use, or batch=fixed"

    def choose(self, trials: Trials, recorded: object = None) -> Batch:
        if trials.resumes:  # the checkpoint has the micro-batch
            return self
        largest = self.global_batch // trials.run.parallel.ranks()
        smallest = min(2, largest)  # BatchNorm cannot train on a single sample
        expected = trials.forecast_micro_batch(largest, self.memory_gb)
        limit = _largest_fitting(lambda sizes: trials.count_fitting(sizes, largest, self.memory_gb), smallest, largest, expected)
        if not limit:
            raise UserError(
                f"batch=auto: not even {smallest} samples fit: raise batch.memory_gb, or save memory "
                "(precision=bf16, checkpointing=blocks, a smaller model)"
            )
        tuned = self.with_values(accumulation_steps=math.ceil(largest / limit))
        fits = f"{limit} samples fit" if limit < largest else f"all {largest} samples fit"
        micro = math.ceil(largest / tuned.accumulation_steps)
        began = "" if expected is None else f"; {expected} were forecast"
        logger.info(f"batch=auto: {fits} at once{began}: {tuned.accumulation_steps} steps of {micro} samples on each rank")
        return tuned


def _largest_fitting(fitting: Callable[[Sequence[int]], int], smallest: int, largest: int, expected: int | None) -> int:
    """The largest size that fits, to within SEARCH_FACTOR, 0 if none does: upwards from the expected one, else below it.

    The trials alone decide. A size that was expected wrongly only makes them more.
    """
    start = smallest if expected is None else max(smallest, min(expected, largest))
    sizes = _upwards(start, largest, SEARCH_FACTOR if expected is not None else 2.0)
    if not (count := fitting(sizes)):
        return _below(fitting, smallest, start)
    if count == len(sizes) or not (between := _sizes_between(sizes[count - 1], sizes[count])):
        return sizes[count - 1]
    return [sizes[count - 1], *between][fitting(between)]


def _below(fitting: Callable[[Sequence[int]], int], smallest: int, high: int) -> int:
    """The largest size below `high` that fits, 0 if none does, by trials further and further below it."""
    factor = SEARCH_FACTOR**2
    while high > smallest:
        low = max(smallest, min(high - 1, int(high / factor)))
        sizes = [low, *_sizes_between(low, high)]
        if count := fitting(sizes):
            return sizes[count - 1]
        high, factor = low, min(2.0, factor**2)
    return 0


def _upwards(start: int, largest: int, factor: float) -> list[int]:
    """Sizes from start to the largest, further and further apart, at most doubled."""
    sizes, size = [], start
    while size < largest:
        sizes.append(size)
        size, factor = max(size + 1, int(size * factor)), min(2.0, factor**2)
    return [*sizes, largest]


def _sizes_between(low: int, high: int) -> list[int]:
    """Return sizes between low and high, each at most SEARCH_FACTOR times the one before."""
    sizes, size = [], low
    while (size := max(size + 1, int(size * SEARCH_FACTOR))) < high:
        sizes.append(size)
    return sizes

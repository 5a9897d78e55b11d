"""Finds the micro-batch that fits into memory."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from drivetrain.batch.base import Batch
from drivetrain.core.errors import UserError
from drivetrain.core.option import Positive, RunSpec

SEARCH_FACTOR = 1.1  # the largest micro-batch is found to within this factor

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Auto(Batch):
    """Finds the largest micro-batch that fits by trial before the run; gradient accumulation keeps the global batch.

    Each trial is a process of its own, which may run out of memory. A CPU has no memory limit: set `memory_gb`.
    """

    effect = "close"
    changes = "gradients are summed by micro-batches, of which BatchNorm takes its statistics"
    fixed_micro_batches: ClassVar[bool] = False
    is_tried: ClassVar[bool] = True

    memory_gb: Positive | None = None

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if run.runtime.device_type() == "cpu" and self.memory_gb is None:
            yield "batch=auto on a CPU needs a limit: set batch.memory_gb to what a rank may use, or batch=fixed"

    def autotune(self, fitting: Callable[[Sequence[int], Any], int], ranks: int) -> Batch:
        largest = self.global_batch // ranks
        # From 2: BatchNorm cannot train on a single sample.
        sizes = sorted({*(2**k for k in range(1, largest.bit_length())), largest})
        fit_count = fitting(sizes, self.memory_gb)
        limit = sizes[fit_count - 1] if fit_count else 0
        if limit and fit_count < len(sizes):
            between = _sizes_between(limit, sizes[fit_count])
            limit = [limit, *between][fitting(between, self.memory_gb)] if between else limit
        if not limit:
            raise UserError(
                f"batch=auto: not even {sizes[0]} samples fit: raise batch.memory_gb, or save memory "
                "(precision=bf16, checkpointing=blocks, a smaller model)"
            )
        tuned = copy.deepcopy(self)
        tuned.accumulation_steps = math.ceil(largest / limit)
        fits = f"{limit} samples fit" if limit < largest else f"all {largest} samples fit"
        micro = math.ceil(largest / tuned.accumulation_steps)
        logger.info(f"batch=auto: {fits} at once: {tuned.accumulation_steps} steps of {micro} samples on each rank")
        return tuned


def _sizes_between(low: int, high: int) -> list[int]:
    """Return sizes between low and high, each at most SEARCH_FACTOR times the one before."""
    sizes, size = [], low
    while (size := max(size + 1, int(size * SEARCH_FACTOR))) < high:
        sizes.append(size)
    return sizes

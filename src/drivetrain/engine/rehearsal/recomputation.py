"""How many of a model's blocks must be recomputed for a step to fit, by the peaks of the step on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from drivetrain.checkpointing.recompute import checkpoint_forward
from drivetrain.engine.rehearsal.fake_step import Rehearsal, one_sample
from drivetrain.engine.rehearsal.largest import peak_bytes


def fewest_recomputed(
    trainer: Any, blocks: Sequence[torch.nn.Module], micro_batch: int, micro_batches: int, limit: float
) -> tuple[int, float]:
    """The fewest of the first blocks with which the step fits, and its peak in bytes; all that help, where none is enough.

    The first blocks are those whose activations wait longest. The trainer cannot train afterwards.
    """
    rehearsal = Rehearsal(trainer, one_sample(trainer))

    def peak(count: int) -> float:
        with recomputed(blocks[:count]):
            return peak_bytes(rehearsal.record(micro_batch, micro_batches))

    return fewest(peak, len(blocks), limit)


def fewest(peak: Callable[[int], float], most: int, limit: float) -> tuple[int, float]:
    """The smallest count up to `most` whose peak is within the limit, with the peak; else the count of the smallest peak seen.

    Found by halving: a peak falls as the count grows, but for the last ones, whose recomputation may save nothing.
    """
    peaks = {count: peak(count) for count in (0, most)}
    low, high = 0, most
    while high - low > 1 and peaks[0] > limit:
        middle = (low + high) // 2
        peaks[middle] = peak(middle)
        low, high = (low, middle) if peaks[middle] <= limit else (middle, high)
    fitting = [count for count in peaks if peaks[count] <= limit]
    best = min(fitting) if fitting else min(peaks, key=lambda count: (peaks[count], count))
    return best, peaks[best]


@contextmanager
def recomputed(blocks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the context these blocks are recomputed in the backward."""
    own = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        checkpoint_forward(block)
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward

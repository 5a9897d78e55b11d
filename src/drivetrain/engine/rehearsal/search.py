"""The search for what fits in memory, by fake steps' peaks: the largest micro-batch, and the fewest recomputed blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from drivetrain.checkpointing.recompute import checkpoint_forward
from drivetrain.engine.rehearsal.fake_step import Rehearsal, StepRecord, one_sample
from drivetrain.engine.rehearsal.recorder import OTHER
from drivetrain.engine.trainer import Trainer

BY_LINE = 4  # numbers that are tried by the line between two peaks; the first is nearly exact, as most memory grows by a line
CLOSE = 0.02  # of the limit: near enough
BUFFERS = 0.1  # of the activations: kernels' own buffers, which fake tensors do not show
HEAP = 1.0  # of the activations: what the heap of a process on a CPU takes beside them, approximately


def largest_micro_batch(trainer: Trainer, most: int, limit: float) -> int:
    """The samples, at most `most`, whose step is forecast to take at most `limit` bytes in tensors; 0: not even two.

    The trainer cannot train afterwards. Raises what the step raises where it needs values.
    """
    beside = HEAP if trainer.device.type == "cpu" else BUFFERS  # trials on a CPU are judged by the process's memory
    rehearsal = Rehearsal(trainer, one_sample(trainer))
    size, peak = furthest(lambda n: peak_bytes(rehearsal.record(n, -(-most // n)), beside), min(2, most), most, limit)
    return size if peak <= limit else 0


def fewest_recomputed(
    trainer: Trainer, blocks: Sequence[torch.nn.Module], micro_batch: int, micro_batches: int, limit: float
) -> tuple[int, float]:
    """The fewest of the first blocks with which the step fits, and its peak in bytes; all of them, where none is enough.

    The first blocks are those whose activations wait longest. The trainer cannot train afterwards.
    """
    rehearsal = Rehearsal(trainer, one_sample(trainer))

    def peak(count: int) -> float:
        with recomputed(blocks[:count]):
            return peak_bytes(rehearsal.record(micro_batch, micro_batches))

    return fewest(peak, len(blocks), limit)


def fewest(peak: Callable[[int], float], most: int, limit: float) -> tuple[int, float]:
    """The smallest count up to `most` whose peak is within the limit, with the peak; `most` where none is."""
    kept, nbytes = furthest(lambda kept: peak(most - kept), 0, most, limit, exact=True)
    return most - kept, nbytes


def peak_bytes(record: StepRecord, beside: float = BUFFERS) -> float:
    """The bytes of a step's tensors at their peak, and a share of the activations `beside` them."""
    return sum(record.peak.values()) + beside * record.peak[OTHER]


def furthest(peak: Callable[[int], float], low: int, high: int, limit: float, exact: bool = False) -> tuple[int, float]:
    """The largest number from `low` to `high` whose peak is within a limit, with the peak; `low` where none is.

    `peak` must not fall. Unless it must be `exact`, a number is taken that is near enough.
    """
    if (at_high := peak(high)) <= limit:
        return high, at_high
    at_low, tried = peak(low), 0
    while at_low <= limit and high - low > 1 and (exact or (tried < BY_LINE and at_low < (1 - CLOSE) * limit)):
        share = (limit - at_low) / (at_high - at_low) if tried < BY_LINE else 0.5
        number, tried = min(max(low + int(share * (high - low)), low + 1), high - 1), tried + 1
        if (at := peak(number)) <= limit:
            low, at_low = number, at
        else:
            high, at_high = number, at
    return low, at_low


@contextmanager
def recomputed(blocks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the context these blocks are recomputed in the backward."""
    with ExitStack() as undo:
        for block in blocks:
            undo.callback(checkpoint_forward(block))
        yield

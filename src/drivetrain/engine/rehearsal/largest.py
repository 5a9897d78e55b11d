"""The largest micro-batch that is forecast to fit: by the peaks of a step on fake tensors, which memory does not limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivetrain.engine.rehearsal.fake_step import Rehearsal, StepRecord, one_sample
from drivetrain.engine.rehearsal.recorder import OTHER

CORRECTIONS = 4  # of the line between two sizes; the first is nearly exact, as most memory grows by a line
CLOSE = 0.02  # of the limit: near enough
BUFFERS = 0.1  # of the activations: kernels' own buffers, which fake tensors do not show
HEAP = 1.0  # of the activations: what the heap of a process on a CPU takes beside them, approximately


def largest_micro_batch(trainer: Any, most: int, limit: float) -> int:
    """The samples, at most `most`, whose step is forecast to take at most `limit` bytes in tensors; 0: not even two.

    The trainer cannot train afterwards. Raises what the step raises where it needs values.
    """
    beside = HEAP if trainer.device.type == "cpu" else BUFFERS  # trials on a CPU are judged by the process's memory
    rehearsal = Rehearsal(trainer, one_sample(trainer))

    def peak(size: int) -> float:
        return peak_bytes(rehearsal.record(size, -(-most // size)), beside)

    return largest_fitting(peak, limit, most)


def peak_bytes(record: StepRecord, beside: float = BUFFERS) -> float:
    """The bytes of a step's tensors at their peak, and a share of the activations `beside` them."""
    return sum(record.peak.values()) + beside * record.peak[OTHER]


def largest_fitting(peak: Callable[[int], float], limit: float, most: int) -> int:
    """The largest size from 2 to `most` whose peak is below a limit, approximately; 0 if there is none. `peak` must not fall."""
    low, high = min(2, most), most
    if (at_high := peak(high)) <= limit:
        return high
    if (at_low := peak(low)) > limit:
        return 0
    for _ in range(CORRECTIONS):
        if high - low <= 1 or at_low >= (1 - CLOSE) * limit:
            break
        size = int(low + (high - low) * (limit - at_low) / (at_high - at_low))
        size = min(max(size, low + 1), high - 1)
        if (at := peak(size)) <= limit:
            low, at_low = size, at
        else:
            high, at_high = size, at
    return low

"""Looks at a run's own step in this process: builds its trainer, records its updates on fake tensors, times operations."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from drivetrain.engine.rehearsal.fake_step import StepRecord
from drivetrain.engine.rehearsal.operation import Operation
from drivetrain.measure.forecast import replay

READS = 4  # micro-batches that are read, for the time of one
ASSUMED_FLOPS, ASSUMED_BANDWIDTH = 3e10, 5e9  # to put operations in order: those first that may take longest


class Row(NamedTuple):
    """An operation of an update, and how often it is made; without what only this process knows."""

    name: str
    kind: str
    dtype: str
    phase: str
    times: int
    flops: int
    nbytes: int
    seconds: float | None  # of one, measured here
    at_most: int  # bytes allocated while it runs, its kernel's own among them where that was measured


def rows(record: StepRecord, device: torch.device, budget_s: float, timed: dict[str, replay.Timed]) -> list[Row]:
    """Return the operations of an update. Those that may take longest are timed here first, until the budget is spent.

    `timed` are those that were timed before; it gets the new ones.
    """
    if budget_s:
        real = {o.signature: o for o in sorted(record.operations, key=lambda o: -_rough(o) * record.operations[o])}
        timed |= replay.measure([o for o in real.values() if o.kind != "view" and o.signature not in timed], device, budget_s)
    return [_row(o, n, timed.get(o.signature), record.most_during.get(o.signature, 0)) for o, n in record.operations.items()]


def _rough(operation: Operation) -> float:
    return operation.flops / ASSUMED_FLOPS + operation.nbytes / ASSUMED_BANDWIDTH


def _row(operation: Operation, count: int, timed: replay.Timed | None, now: int) -> Row:
    name = operation.call[0]._overloadpacket.__name__
    dtype = str(operation.dtype).removeprefix("torch.")
    seconds, workspace = timed or (None, 0)
    return Row(name, operation.kind, dtype, operation.phase, count, operation.flops, operation.nbytes, seconds, now + workspace)


def reading_seconds(trainer: Any, device: torch.device) -> float:
    """The time in which this process reads and delivers one micro-batch: the shortest of some after the first, which prepares."""
    now, times = replay.clock(device), []
    stream = trainer.loader.stream(trainer.train_data, trainer.requests(), trainer.device, trainer.memory_format)
    for _ in range(READS):
        began = now()
        if next(stream, None) is None:
            break
        times.append(now() - began)
    stream.close()
    return min(times[1:] or times, default=0.0)

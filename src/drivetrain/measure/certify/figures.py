"""The figures of an evaluation as entries of a trace, with what rounding may change in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from drivetrain.measure.certify.judge import MARGIN
from drivetrain.measure.certify.trace import FLOAT32, Entry, of_numbers


def figures(trainer: Any) -> Iterator[tuple[str, Entry]]:
    """Yield each figure of a trainer's last evaluation.

    One that counts answers may change by one: rounding may move a sample over the threshold between two of them.
    """
    evaluator, world = trainer.evaluator, trainer.parallel.data_world
    counting = {*evaluator.loss.counting, *(name for meter in evaluator.meters if meter.counts for name in meter.directions)}
    batches = evaluator.batch.evaluation(evaluator.data.source, world)[: evaluator.max_batches]
    one = 1 / max(1, sum(map(len, batches)))
    for name, value in trainer.progress.final.items():
        entry = of_numbers(value, rounding=FLOAT32)
        counts = name.removeprefix("ema_") in counting
        yield name, replace(entry, rounding=max(entry.rounding, one / MARGIN)) if counts else entry

"""Remarks on a completed run's figures, and a comparison with its data's baseline."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from drivetrain.core.machine import process
from drivetrain.core.options.selection import Figure, handed_on
from drivetrain.core.step.source import Source
from drivetrain.data import Data
from drivetrain.run import reader, remarks
from drivetrain.run.result import Result

if TYPE_CHECKING:
    from drivetrain.engine.context import RunContext
    from drivetrain.engine.trainer import Trainer

logger = logging.getLogger(__name__)


def of_curves_and_test(result: Result, trainer: Trainer) -> Iterator[str]:
    """The remarks on the run's curves and its accuracies."""
    if not result.stopped:
        loss = str(Figure("loss", set=Figure.parse(trainer.selection.name).set))
        yield from remarks.of_curves(*reader.points(trainer.run_dir / "metrics.jsonl"), loss, trainer.saving.best)
    sets = trainer.evaluator.sets["test"] if result.shares else {}
    yield from remarks.of_test(
        result, {name: share for name, each in sets.items() if (share := commonest(each.source)) is not None}
    )


def commonest(source: Source) -> float | None:
    """The share of a set's commonest class, if labels are known without reading the samples."""
    labels = source.labels() if source.own_code is None else None
    return None if labels is None or labels.ndim != 1 else (labels == labels.mode().values).sum().item() / len(labels)


def against_baseline(result: Result, trainer: Trainer, context: RunContext) -> Iterator[tuple[bool, str]]:
    """Measure the data's baseline like the model; yield whether it is better, and a sentence about it.

    Called on all ranks. A baseline that cannot be measured only warns: the trained model is kept.
    """
    began, own, evaluator = time.perf_counter(), time.monotonic() - process.started, trainer.evaluator
    try:
        if (fitted := Data.of(context.run).fitted_baseline(context.data)) is None:
            return
        seconds = time.perf_counter() - began
        for name in dict.fromkeys((evaluator.set, "test")):
            measured = replace(evaluator.on(name), forward=fitted, tables={}).metrics()
            result.metrics.setdefault(name, {})["baseline"] = measured
    except Exception as error:  # the loss may need other outputs, and scikit-learn more memory
        logger.warning("data.baseline=true: it cannot be measured (%s: %s): set it to false", type(error).__name__, error)
        return
    base, ours = result.tested("baseline"), handed_on(result.tested("best") or result.tested())
    selection = trainer.selection.across_runs
    for of_set, name in Figure.parse(selection.name).on_all_sets(base).items():
        if name in ours:
            is_better = ours[name] != base[name] == selection.better(ours[name], base[name])
            word = "the baseline is better" if is_better else "the baseline is not better"
            yield (
                is_better,
                (
                    f"{word}: {fitted.name} on {fitted.rows:,} of the same rows has {name} {base[name]:.4g} on the "
                    f"{f'test set {of_set}'.rstrip()} after {seconds:.1f} s, this model {ours[name]:.4g} after {own:.1f} s"
                ),
            )

"""Computes the metrics of a model over a data set."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from drivetrain.batch.base import Batch
from drivetrain.core import rng, streams
from drivetrain.core.device import sum_dtype
from drivetrain.core.errors import Diverged, Interrupted, UserError
from drivetrain.core.protocols import Loader
from drivetrain.core.signals import StopFlag
from drivetrain.core.trees import Tree
from drivetrain.ema.base import Ema
from drivetrain.loader.base import Pipeline
from drivetrain.loss.base import Loss
from drivetrain.metrics.base import Metric, Table
from drivetrain.parallel.base import Parallel
from drivetrain.precision.base import Precision

logger = logging.getLogger(__name__)


@dataclass
class Evaluator:
    """Evaluates a model and the average of its weights on `data`: the set that models are selected by."""

    model: torch.nn.Module  # set to evaluation mode during evaluation, then back to training mode
    forward: Callable[[Tree], Any]  # the model as evaluation calls it, with a batch's inputs
    eval_weights: Callable[[], AbstractContextManager[None]]  # a context in which the model holds the weights to evaluate
    ema: Ema
    loss: Loss
    meters: Sequence[Metric]  # the metrics beside those of the loss
    units: Callable[[Any], Any]  # turns outputs and targets into those that the metrics measure
    selected: str  # the metric that ranks models
    precision: Precision
    parallel: Parallel
    batch: Batch
    loader: Loader
    data: Pipeline
    test: Pipeline  # the same as `data` where there is no validation set
    set: str  # the name of `data`: validation or test
    device: torch.device
    memory_format: torch.memory_format
    max_batches: int | None = None
    origins: Mapping[str, str] = field(default_factory=dict)  # set → where its samples come from, in words, where it is known
    tables: dict[str, Table] = field(default_factory=dict)  # of the last evaluation, by name

    def on(self, name: str) -> Evaluator:
        """Return the evaluator of a set, by its name. Raises UserError where the run has no such set."""
        if name == self.set:
            return self
        if name != "test":
            raise UserError(f"split={name}: this run has no {name} set (data.validation=null): set split=test")
        return replace(self, data=self.test, set="test", tables={})

    def evaluate(self, stops: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Return the metrics by name; those of the averaged weights begin with "ema_". Raises Diverged if one is not finite.

        `stops` is asked before each batch, equally often on all ranks: where it says yes on all of them, Interrupted is raised.
        """
        self.parallel.broadcast_buffers(self.model)
        self.tables = {}
        with self.eval_weights():
            metrics = self.metrics(stops=stops)
        if self.ema.active and not self.ema.started:  # the average is the weights still
            self.tables |= {f"ema_{name}": table for name, table in self.tables.items()}
            metrics |= {f"ema_{name}": value for name, value in metrics.items()}
        elif self.ema.active:
            with self.ema.swapped():
                self.parallel.broadcast_buffers(self.model)  # each rank averaged its own buffers
                metrics |= self.metrics("ema_", stops)
        if self.selected not in metrics:
            raise Diverged(f"{self.selected} ranks the run's models, and an evaluation gives no finite value of it: {metrics}")
        return metrics

    def metrics(self, prefix: str = "", stops: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Return the metrics of the model's current weights, and add their tables. Raises Diverged and, by `stops`, Interrupted.

        Sums and counts are reduced over the ranks, not means, so that every sample counts once on any number of ranks. What a
        forward draws follows from the seed, the set and the batch: training's random streams stay as they are.
        """
        self.model.eval()
        sums = torch.zeros(self.loss.evaluation_sums(), dtype=sum_dtype(self.device), device=self.device)
        world, lockstep = self.parallel.data_world, self.parallel.lockstep_evaluation
        requests = self.batch.evaluation_requests(self.data.source, world, self.max_batches, lockstep)
        rounds = self.batch.evaluation_rounds(self.data.source, world, self.max_batches)
        stream = self.loader.stream(self.data, requests, self.device, self.memory_format)
        for meter in self.meters:
            meter.reset()
        with self.parallel.evaluation_context(), streams.apart():
            with closing(stream):  # type: ignore[type-var]
                for number, batch in enumerate(stream):
                    rounds -= 1
                    _stop_here(stops)
                    streams.seed_all(rng.mix(self.data.seed, number * world.size + world.rank))
                    with self.precision.autocast():
                        output, of_batch = self.loss.evaluate(self.forward, batch, need_output=bool(self.meters))
                    sums += of_batch * batch.weight
                    for meter in () if batch.filler else self.meters:
                        meter.update(self.units(output), self.units(batch.y))
            if rounds > 0:  # the other ranks have one batch more
                _stop_here(stops)
            figures = self.loss.evaluated(self.parallel.all_reduce_sum(sums).tolist())
            if not all(map(math.isfinite, figures.values())):
                weights = "averaged" if prefix else "trained"
                raise Diverged(f"the loss of the {weights} weights on the {self.set} set is not finite: {figures}")
            for meter in self.meters:
                found, tables = meter.result()
                figures |= finite(found)
                self.tables |= {prefix + name: table for name, table in tables.items()}
        self.model.train()
        return {prefix + name: value for name, value in figures.items()}


def _stop_here(stops: Callable[[], bool]) -> None:
    """Raise Interrupted where this run, or this process, is to stop at a batch of an evaluation."""
    StopFlag.stop_here()
    if stops():
        raise Interrupted("stopped by a signal while a data set was evaluated")


def finite(figures: dict[str, float]) -> dict[str, float]:
    """Return the figures that are finite: a metric may be undefined, as where a class has no sample in the set."""
    for name, value in figures.items():
        if not math.isfinite(value):
            logger.warning("%s is %s in this evaluation, and is left out", name, value)
    return {name: value for name, value in figures.items() if math.isfinite(value)}

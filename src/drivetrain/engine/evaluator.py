"""Computes the metrics of a model over a data set."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.batch.base import Batch
from drivetrain.core.device import sum_dtype
from drivetrain.core.errors import Diverged
from drivetrain.core.trees import Tree
from drivetrain.ema.base import Ema
from drivetrain.loader.base import Loader, Pipeline
from drivetrain.loss.base import Loss
from drivetrain.parallel.base import Parallel
from drivetrain.precision.base import Precision


@dataclass
class Evaluator:
    """Evaluates a model and the average of its weights on `data`."""

    model: torch.nn.Module  # set to evaluation mode during evaluation, then back to training mode
    forward: Callable[[Tree], Any]  # the model as evaluation calls it, with a batch's inputs
    eval_weights: Callable[[], AbstractContextManager[None]]  # a context in which the model holds the weights to evaluate
    ema: Ema
    loss: Loss
    precision: Precision
    parallel: Parallel
    batch: Batch
    loader: Loader
    data: Pipeline
    device: torch.device
    memory_format: torch.memory_format
    max_batches: int | None = None

    def evaluate(self) -> dict[str, float]:
        """Return the metrics by name; those of the averaged weights begin with "ema_". Raises Diverged if one is not finite."""
        self.parallel.broadcast_buffers(self.model)
        with self.eval_weights():
            metrics = self.metrics()
        if self.ema.active:
            with self.ema.swapped():
                self.parallel.broadcast_buffers(self.model)  # each rank averaged its own buffers
                metrics |= {f"ema_{name}": value for name, value in self.metrics().items()}
        if not all(map(math.isfinite, metrics.values())):
            raise Diverged(f"an evaluation is not finite: {metrics}")
        return metrics

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the model's current weights.

        Sums and counts are reduced over the ranks, not means, so that every sample counts once on any number of ranks.
        """
        self.model.eval()
        sums = torch.zeros(self.loss.evaluation_sums(), dtype=sum_dtype(self.device), device=self.device)
        world, lockstep = self.parallel.data_world, self.parallel.lockstep_evaluation
        requests = self.batch.evaluation_requests(self.data.source, world, self.max_batches, lockstep)
        stream = self.loader.stream(self.data, requests, self.device, self.memory_format)
        with self.parallel.evaluation_context():
            for batch in stream:
                with self.precision.autocast():
                    output = self.forward(batch.x)
                sums += self.loss.sums(output, self.loss.evaluation_target(batch)) * batch.weight
        totals = self.parallel.all_reduce_sum(sums).tolist()
        self.model.train()
        return self.loss.evaluated(totals)

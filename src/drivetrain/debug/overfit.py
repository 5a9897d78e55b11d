"""Tests whether a model can overfit one batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch, one_update
from drivetrain.core.option import Count, Positive, RunSpec
from drivetrain.core.order import index_of
from drivetrain.core.source import Subset
from drivetrain.core.step import StreamWatcher
from drivetrain.core.world import World
from drivetrain.debug.base import Debug

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext


class Overfit(Debug):
    """Trains on the first batch only, evaluates on it, and reports whether the loss gets below `target`.

    If a model cannot overfit one batch, the model, its loss, its learning rate or its labels are wrong.
    """

    effect = "changes"
    changes = "all updates are made with the first batch"
    augments = False

    def __init__(self, updates: Count = 200, target: Positive = 0.1) -> None:
        self.updates, self.target = updates, target

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.augment:
            yield f"debug=overfit leaves {run.named('augment')} out: the batch stays the same"
        if run.ema.active:
            yield f"debug=overfit looks at the raw weights, not at those of {run.named('ema')}"

    def setup(self, context: BuildContext) -> None:
        self._context = context

    def choose_data(self, train: Any, evaluated: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        context = self._context
        requests = context.batch.requests(context.seed, 0, World(), context.run.data.drop_last)
        batch = torch.cat([request.indices for request in one_update(requests)])
        same = train._replace(source=Subset(train.source, index_of(batch)))
        return {split: dict.fromkeys(sets, same) for split, sets in evaluated.items()}

    def stream_watchers(self) -> list[StreamWatcher]:
        return [self._repeat_first_update]

    def _repeat_first_update(self, stream: Any) -> Iterator[MicroBatch]:
        """Yield the first update's micro-batches again and again, in place of the stream."""
        stream.close()
        context = self._context
        samples, drop_last = context.batch.order.length, context.run.data.drop_last
        requests = context.batch.requests(context.seed, 0, context.parallel.data_world, drop_last)
        first = one_update(requests)  # of the run, also when it is resumed
        batch = list(context.loader.stream(context.train_data, first, context.device, context.memory_format))
        start, skip = context.progress.epoch, context.progress.window
        for epoch in range(start, context.run.values["epochs"]):
            updates = context.batch.updates(samples, epoch, drop_last)
            for window in range(skip if epoch == start else 0, updates):
                for micro in batch:
                    yield replace(micro, epoch_end=micro.last and window + 1 == updates)

    def report(self) -> list[str]:
        progress = self._context.progress
        if (loss := progress.final.get("loss")) is None:
            return []
        after = f"after {progress.updates} updates on one batch of {len(self._context.judging_data.source)} the loss is"
        if loss < self.target:
            return [f"debug=overfit: {after} {loss:.4g}, below {self.target:g}: model, loss and optimizer can learn"]
        return [
            f"debug=overfit: {after} {loss:.4g}, not below {self.target:g}: something is broken, or needs more debug.updates or "
            "another learning rate. Look at the labels, at detached or frozen parts of the model, at debug=gradcheck"
        ]

"""The first question to ask a model: can it learn one batch by heart?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch, one_update
from drivetrain.core.option import Count, Positive, RunSpec
from drivetrain.core.world import World
from drivetrain.debug.base import Debug


class Overfit(Debug):
    """Train on the first batch again and again, evaluate on it, and say whether the loss gets below `target`.

    A model that cannot learn one batch by heart is broken, or its loss, its learning rate or its labels are.
    """

    def __init__(self, updates: Count = 200, target: Positive = 0.1) -> None:
        self.updates, self.target = updates, target
        self._trainer: Any = None

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.choices["augment"]:
            yield f"debug=overfit leaves {run.named('augment')} out: the batch stays the same"
        if run.choices["ema"] != "none":
            yield f"debug=overfit judges the raw weights, not those of {run.named('ema')}"

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer
        trainer.train_data = trainer.train_data._replace(steps=())
        trainer.batch.pairs = False
        order = getattr(trainer.train_data.source, "order", None)
        whole = trainer.batch.requests(len(trainer.train_data.source), trainer.seed, 0, World(), trainer.drop_last, order=order)
        batch = torch.cat([request.indices for request in one_update(whole)])
        trainer.test_data = trainer.train_data._replace(source=_Part(trainer.train_data.source, batch))
        trainer.watch = self._repeated

    def _repeated(self, stream: Any) -> Iterator[MicroBatch]:
        trainer, samples = self._trainer, len(self._trainer.train_data.source)
        stream.close()
        requests = trainer.batch.requests(
            samples, trainer.seed, 0, trainer.parallel.data, trainer.drop_last, device=trainer.device,
            order=getattr(trainer.train_data.source, "order", None),
        )  # fmt: skip
        first = one_update(requests)  # of the run's start, wherever it goes on
        batch = list(trainer.loader.stream(trainer.train_data, first, trainer.device, trainer.memory_format))
        start, skip = trainer.progress.epoch, trainer.progress.window
        for epoch in range(start, trainer.epochs):
            updates = trainer.batch.updates(samples, epoch, trainer.drop_last)
            for window in range(skip if epoch == start else 0, updates):
                for micro in batch:
                    yield replace(micro, epoch_end=micro.last and window + 1 == updates)

    def stop(self) -> list[str]:
        loss = self._trainer.progress.final.get("loss") if self._trainer is not None else None
        if loss is None:
            return []
        after = (
            f"after {self._trainer.progress.updates} updates on one batch of {len(self._trainer.test_data.source)} the loss is"
        )
        if loss < self.target:
            return [f"debug=overfit: {after} {loss:.4g}, below {self.target:g}: model, loss and optimizer can learn"]
        return [
            f"debug=overfit: {after} {loss:.4g}, not below {self.target:g}: something is broken, or needs more debug.updates or "
            "another learning rate. Look at the labels, at detached or frozen parts of the model, at debug=gradcheck"
        ]


class _Part:
    """Some of a source's samples, as a source."""

    def __init__(self, source: Any, indices: torch.Tensor) -> None:
        self.source, self.indices = source, indices

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.source.fetch(self.indices[indices])

"""A step for losses that average over items whose number only the targets tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.step import Step
from drivetrain.loss.base import SMALLEST, Loss
from drivetrain.parallel.base import Parallel


@dataclass(eq=False)
class CountedStep:
    """Weights each micro-batch by its share of the update's items (pixels, class weights), over all micro-batches and ranks.

    The targets tell the counts before the first forward, so the inner step has the right weight from the start. The mean is
    that of one big batch with any precision, strategy and clipping. An update's micro-batches wait on the device for the
    last one; their counts are summed over the ranks on the device, and nothing is read back.
    """

    inner: Step
    loss: Loss
    parallel: Parallel
    waiting: list[MicroBatch] = field(default_factory=list)

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        self.waiting.append(batch)
        if batch.last:
            waiting, self.waiting = self.waiting, []
            for shared in self._shared(waiting):
                self.inner.micro_batch(shared, loss_sum)

    def _shared(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches of an update with their weights. One that only fills up, of weight 0, keeps it."""
        counts = torch.stack([self.loss.count(batch.y) * batch.weight.sign() for batch in batches])
        total = self.parallel.all_reduce_sum(counts.sum(0))
        shares = (counts * self.parallel.data_world.size / total.clamp(min=SMALLEST)).to(batches[0].weight.dtype)
        return [self.loss.share(batch, share) for batch, share in zip(batches, shares.unbind(), strict=True)]

    def update(self) -> bool:
        return self.inner.update()

    def zero_grad(self) -> None:
        """Clear the gradients, and what waits: an update that ran out of memory is repeated."""
        self.waiting = []
        self.inner.zero_grad()

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> Step:
        return replace(self, inner=self.inner.with_forward(forward), waiting=[])

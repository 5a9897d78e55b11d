"""A step for losses that average over items whose number only the targets tell."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from drivetrain.core.microbatch import MicroBatch
from drivetrain.engine.whole_update import WholeUpdateStep
from drivetrain.loss.base import SMALLEST, Loss
from drivetrain.parallel.base import Parallel


@dataclass(eq=False)
class CountedStep(WholeUpdateStep):
    """Weights each micro-batch by its share of the update's items (pixels, class weights), over all micro-batches and ranks.

    The targets tell the counts before the first forward, so the inner step has the right weight from the start. The mean is
    that of one big batch with any precision, strategy and clipping. The counts are summed over the ranks on the device, and
    nothing is read back.
    """

    loss: Loss
    parallel: Parallel

    def run(self, batches: list[MicroBatch], loss_sum: torch.Tensor) -> None:
        for shared in self._shared(batches):
            self.inner.micro_batch(shared, loss_sum)

    def _shared(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches of an update with their weights. One that only fills up, of weight 0, keeps it."""
        counts = torch.stack([self.loss.items(batch) * batch.weight.sign() for batch in batches])
        total = self.parallel.all_reduce_sum(counts.sum(0))
        shares = (counts * self.parallel.data_world.size / total.clamp(min=SMALLEST)).to(batches[0].weight.dtype)
        rows = zip(batches, shares.unbind(), strict=True)
        if counts.dim() == 1:
            return [replace(batch, weight=share) for batch, share in rows]
        # A sum of losses multiplies by the shares itself, each part by its own.
        return [replace(batch, weight=torch.ones_like(batch.weight), shares=share) for batch, share in rows]

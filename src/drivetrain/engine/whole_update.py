"""The base of steps that see all micro-batches of an update before the first forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.step import Step, WrappingStep


@dataclass(eq=False)
class WholeUpdateStep(WrappingStep):
    """Keeps an update's micro-batches, which wait on the device, until the last one is there."""

    waiting: list[MicroBatch] = field(default_factory=list, kw_only=True)

    def run(self, batches: list[MicroBatch], loss_sum: torch.Tensor) -> None:
        """Run forward and backward of an update's micro-batches."""
        raise NotImplementedError

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        self.waiting.append(batch)
        if batch.last:
            waiting, self.waiting = self.waiting, []
            self.run(waiting, loss_sum)

    def zero_grad(self) -> None:
        """Clear the gradients, and what waits: an update that ran out of memory is repeated."""
        self.waiting = []
        super().zero_grad()

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> Step:
        return replace(self, inner=self.inner.with_forward(forward), waiting=[])

"""The training step of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from drivetrain.core.options.protocols import LossStep, PrecisionStep
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.step import Made


@dataclass(frozen=True, eq=False)
class PlainStep:
    """Runs forward and backward of each micro-batch, then one update. `Step` in core/step/step.py documents the methods."""

    forward: Callable[..., torch.Tensor]  # the model, compiled and wrapped
    loss: LossStep
    precision: PrecisionStep
    optimizer: torch.optim.Optimizer
    clip: Callable[[], bool | None]
    clear_gradients: Callable[[], None]

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        with self.precision.autocast():
            loss = self.loss.step(self.forward, batch)
        self.precision.backward(loss, batch.weight)
        loss_sum.addcmul_(loss.detach(), batch.weight)

    def update(self) -> Made:
        return self.precision.step(self.optimizer, self.clip)

    def zero_grad(self) -> None:
        self.clear_gradients()

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> PlainStep:
        return replace(self, forward=forward)

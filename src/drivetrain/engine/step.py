"""The step of one process, as it is written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from drivetrain.core.microbatch import MicroBatch
from drivetrain.precision.base import Precision


@dataclass(frozen=True, eq=False)
class PlainStep:
    """Forward and backward of each micro-batch, then one update. `Step` in core/step.py says what each method promises."""

    forward: Callable[..., torch.Tensor]  # the model: compiled and wrapped as the run asks for
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    precision: Precision
    optimizer: torch.optim.Optimizer
    clip: Callable[[], None]
    forget: Callable[[], None]  # forgets the gradients

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        with self.precision.autocast():
            loss = self.loss(self.forward(batch.x), batch.y)
        self.precision.backward(loss, batch.weight)
        loss_sum.addcmul_(loss.detach(), batch.weight)

    def update(self) -> bool:
        return self.precision.step(self.optimizer, self.clip)

    def zero_grad(self) -> None:
        self.forget()

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> PlainStep:
        return replace(self, forward=forward)

"""One update: its micro-batches forward and backward, then the optimizer. What `compile=step` makes one graph of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drivetrain.lazy import torch
from drivetrain.plan import Micro


@dataclass
class Step:
    """The parts of an update, called op by op."""

    forward: Callable[[torch.Tensor], torch.Tensor]  # the model, compiled and wrapped as asked for
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer
    precision: Any
    parallel: Any
    clip: Callable[[], None]
    zero_grad: Callable[[], None]

    def micro(self, micro: Micro) -> torch.Tensor:
        """Add one micro-batch's gradients; its loss, without history."""
        with self.parallel.sync(self.forward, micro.last):
            with self.precision.autocast():
                loss = self.loss(self.forward(micro.x), micro.y)
            self.precision.backward(loss, micro.weight)
        return loss.detach()

    def update(self) -> bool:
        """Update the weights and forget the gradients; False if the update was skipped."""
        done = self.precision.step(self.optimizer, self.clip)
        self.zero_grad()
        return done

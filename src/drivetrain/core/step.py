"""The training step, as the protocol that everything uses to run, wrap or measure it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch

StreamWatcher = Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]  # wraps the training stream and observes it


class Step(Protocol):
    """Forward, backward and update. A technique that changes the step wraps another Step.

    The loop calls `micro_batch` for each micro-batch of an update, then `update` and `zero_grad` once.
    """

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        """Run forward and backward. Adds loss × `batch.weight`, without history, to `loss_sum` (0-d) in place."""

    def update(self) -> bool:
        """Clip the gradients and update the weights. Returns False if skipped; then schedule and EMA must not move."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> Step:
        """Return the same step with another callable in place of the model's forward."""

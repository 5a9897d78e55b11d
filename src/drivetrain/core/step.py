"""The step of a training loop, as everything that runs, wraps or measures it sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch

StreamWatcher = Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]  # passes the training stream on, and looks at it


class Step(Protocol):
    """Forward, backward and update. A technique that changes the step wraps another Step.

    The loop calls `micro_batch` for each micro-batch of an update, then `update` and `zero_grad` once.
    """

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        """Run forward and backward. Adds loss × `batch.weight`, without history, to `loss_sum` (0-d) in place."""

    def update(self) -> bool:
        """Clip the gradients and update the weights. False if the update was skipped; then nothing else may move."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> Step:
        """The same step with another callable in place of the model's forward."""

"""The protocol of the training step, used to run, wrap and measure it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from drivetrain.core.lazy import torch
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.tensors import has_streams

Stream: TypeAlias = Generator[MicroBatch, None, None]  # of the micro-batches of training
StreamWatcher = Callable[[Stream], Stream]  # wraps the training stream and observes it


class LateAnswer:
    """Whether an update was made; only the device knows.

    Reading it waits until the device has made or skipped the update. A read one update later usually does not wait, because the
    device is then busy with that update's forward and backward.
    """

    def __init__(self, overflow: torch.Tensor) -> None:
        self._overflow = overflow.to("cpu", non_blocking=True)  # 0-d or (1,); into pinned memory
        self._arrived = torch.Event(overflow.device) if has_streams(overflow.device) else None
        if self._arrived is not None:
            self._arrived.record()

    def __bool__(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        return not float(self._overflow)


Made: TypeAlias = bool | LateAnswer


class Step(Protocol):
    """Forward, backward and update. A technique that changes the step wraps another one, by a WrappingStep.

    The loop calls `micro_batch` for each micro-batch of an update, then `update` and `zero_grad` once.
    """

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        """Run forward and backward. Adds loss × `batch.weight`, without history, to `loss_sum` (0-d) in place."""

    def update(self) -> Made:
        """Clip the gradients and update the weights. False if skipped; then schedule and EMA must not move."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> Step:
        """Return the same step with another callable instead of the model's forward."""


@dataclass(eq=False)
class WrappingStep:
    """A step around another one. It passes calls on; a technique overrides the methods that it changes."""

    inner: Step

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        self.inner.micro_batch(batch, loss_sum)

    def update(self) -> Made:
        return self.inner.update()

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> Step:
        return replace(self, inner=self.inner.with_forward(forward))

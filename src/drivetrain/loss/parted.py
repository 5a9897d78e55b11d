"""The base of losses that consist of parts, each of which is logged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.loss.base import Loss


class Shared(NamedTuple):
    """The target of a step: what the loss is computed from, and the micro-batch's share of the update's items."""

    target: Any
    share: torch.Tensor  # 0-d; for a sum of several losses (losses,)


class PartedLoss(Loss):
    """A loss that needs more than the targets, or logs its parts as loss_<name>.

    The step hands it the micro-batch's share of the update's items with the target, so that each part is exact on its own.
    """

    counted = True

    def __init__(self) -> None:
        self.running: dict[str, torch.Tensor] = {}

    def begin(self, device: torch.device, *names: str) -> None:
        """Start the running sums of these parts. All ranks log the same parts, also those that compute no loss (pipeline)."""
        self.running = {name: torch.zeros((), device=device) for name in names}

    def parts(self) -> dict[str, torch.Tensor]:
        return {f"loss_{name}": total for name, total in self.running.items()}

    def share(self, batch: MicroBatch, share: torch.Tensor) -> MicroBatch:
        # The loss multiplies by the share itself, each part by its own.
        target: Any = Shared(self.training_target(batch), share)
        return replace(batch, y=target, weight=torch.ones_like(batch.weight))

    def training_target(self, batch: MicroBatch) -> Any:
        """What the training loss is computed from besides the output."""
        return batch.y

    def log(self, name: str, value: torch.Tensor) -> None:
        """Add a part's value, already multiplied by its share, to its running sum."""
        if name not in self.running:
            self.running[name] = torch.zeros((), device=value.device)
        self.running[name].add_(value.detach())

"""The base of losses that consist of parts, each of which is logged."""

from __future__ import annotations

from drivetrain.core.lazy import torch
from drivetrain.loss.base import Loss


class PartedLoss(Loss):
    """A loss that logs its parts as loss_<name>: each is added up times its share of the update's items."""

    counted = True

    def __init__(self) -> None:
        self.running: dict[str, torch.Tensor] = {}

    def begin(self, device: torch.device, *names: str) -> None:
        """Start the running sums of these parts. All ranks log the same parts, also those that compute no loss (pipeline)."""
        self.running = {name: torch.zeros((), device=device) for name in names}

    def parts(self) -> dict[str, torch.Tensor]:
        return {f"loss_{name}": total for name, total in self.running.items()}

    def log(self, name: str, value: torch.Tensor) -> None:
        """Add a part's value, already multiplied by its share, to its running sum."""
        if name not in self.running:
            self.running[name] = torch.zeros((), device=value.device)
        self.running[name].add_(value.detach())

"""Samples that are held in memory, the CPU's or a device's."""

from __future__ import annotations

from drivetrain.core.lazy import torch


class Tensors:
    """A source held in memory: inputs (n, …) and targets (n, …)."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.x.is_cuda:  # the copy of the indices must not wait for the device
            indices = indices.pin_memory().to(self.x.device, non_blocking=True)
        return self.x.index_select(0, indices), self.y.index_select(0, indices)

    def to(self, device: torch.device) -> Tensors:
        """The same on a device."""
        return Tensors(self.x.to(device), self.y.to(device))

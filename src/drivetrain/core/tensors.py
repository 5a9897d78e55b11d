"""A data source in the memory of the CPU or of a device."""

from __future__ import annotations

from drivetrain.core.lazy import torch


class Tensors:
    """A data source of two tensors: inputs (n, …) and targets (n, …)."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples at these indices (n,), which are on the CPU."""
        if self.x.is_cuda:  # pinned, so that the copy of the indices does not wait for the device
            indices = indices.pin_memory().to(self.x.device, non_blocking=True)
        return self.x.index_select(0, indices), self.y.index_select(0, indices)

    def to(self, device: torch.device) -> Tensors:
        """The same source on a device."""
        return Tensors(self.x.to(device), self.y.to(device))

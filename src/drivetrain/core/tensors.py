"""Copies to a device, and a data source of tensors in the memory of the CPU or of a device."""

from __future__ import annotations

from drivetrain.core.lazy import torch

WITHOUT_STREAMS = ("cpu", "mps")  # MPS copies straight from the CPU's pages, and may still read them when the host goes on


def has_streams(device: torch.device) -> bool:
    """Whether a device works in streams, and copies from pinned memory while the host goes on (CUDA, ROCm, XPU)."""
    return device.type not in WITHOUT_STREAMS


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device, without waiting for the device where it has streams.

    The copy goes through pinned memory: from other memory the driver may wait for the stream first. torch reuses a pinned
    block only when the copies from it are done, so the caller may drop the tensor at once.
    """
    if tensor.device.type != "cpu" or not has_streams(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Tensors:
    """A data source of two tensors: inputs (n, …) and targets (n, …)."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples at these indices (n,), which are on the CPU."""
        indices = send(indices, self.x.device)
        return self.x.index_select(0, indices), self.y.index_select(0, indices)

    def to(self, device: torch.device) -> Tensors:
        """The same source on a device."""
        return Tensors(self.x.to(device), self.y.to(device))

"""Copies to a device, and a data source of tensors in the memory of the CPU or of a device."""

from __future__ import annotations

from drivetrain.core import trees
from drivetrain.core.lazy import torch
from drivetrain.core.trees import Tree

WITHOUT_STREAMS = ("cpu", "mps")  # MPS copies straight from the CPU's pages, and may still read them when the host goes on


def has_streams(device: torch.device) -> bool:
    """Whether a device works in streams, and copies from pinned memory while the host goes on (CUDA, ROCm, XPU)."""
    return device.type not in WITHOUT_STREAMS


def send(tree: Tree, device: torch.device) -> Tree:
    """Copy a tensor, or each tensor of a tree, to a device, without waiting for the device where it has streams.

    The copy goes through pinned memory: from other memory the driver may wait for the stream first. torch reuses a pinned
    block only when the copies from it are done, so the caller may drop the tensor at once.
    """
    if not has_streams(device):
        return trees.to(tree, device)
    return trees.map_tensors(lambda tensor: _send_through_pinned_memory(tensor, device), tree)


def _send_through_pinned_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device) if tensor.device.type != "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Tensors:
    """A data source in memory: inputs (n, …) and targets (n, …), each a tensor or a tree of them."""

    def __init__(self, x: Tree, y: Tree) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return trees.length(self.y)

    def fetch(self, indices: torch.Tensor) -> tuple[Tree, Tree]:
        """The samples at these indices (n,), which are on the CPU."""
        indices = send(indices, self.device)
        return trees.select(self.x, indices), trees.select(self.y, indices)

    @property
    def device(self) -> torch.device:
        """The device that the samples are on."""
        return trees.first(self.x).device

    def to(self, device: torch.device) -> Tensors:
        """The same source on a device."""
        return Tensors(trees.to(self.x, device), trees.to(self.y, device))

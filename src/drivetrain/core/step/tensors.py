"""Copies to a device, and a data source of tensors in the memory of the CPU or of a device."""

from __future__ import annotations

from drivetrain.core.lazy import torch
from drivetrain.core.step import trees
from drivetrain.core.step.source import Source
from drivetrain.core.step.trees import Tree

WITHOUT_STREAMS = ("cpu", "mps")  # MPS copies straight from the CPU's pages, and may still read them when the call returns


def has_streams(device: torch.device) -> bool:
    """True if a device works in streams, and copies from pinned memory asynchronously (CUDA, ROCm, XPU)."""
    return device.type not in WITHOUT_STREAMS


def send(tree: Tree, device: torch.device) -> Tree:
    """Copy a tensor, or each tensor of a tree, to a device, without waiting for the device where it has streams.

    The copy goes through pinned memory: from other memory the driver may wait for the stream first. torch reuses a pinned
    block only when the copies from it are done, so the caller may drop the tensor at once.
    """
    if not has_streams(device):
        return trees.to(tree, device)
    return trees.map_tensors(
        lambda t: t.to(device) if t.device.type != "cpu" else t.pin_memory().to(device, non_blocking=True), tree
    )


class Tensors(Source):
    """A data source in memory: inputs (n, …) and targets (n, …), each a tensor or a tree of them.

    `rows` (m,) selects samples without a copy.
    """

    def __init__(self, x: Tree, y: Tree, rows: torch.Tensor | None = None) -> None:
        self._x, self._y, self._rows = x, y, rows
        self.device = trees.first(x).device  # of the samples

    def __len__(self) -> int:
        return trees.length(self._y) if self._rows is None else len(self._rows)

    def fetch(self, indices: torch.Tensor) -> tuple[Tree, Tree]:
        """The samples at these indices (n,), which are on the CPU."""
        indices = indices if self._rows is None else self._rows[indices]
        if self.device.type != "cpu":
            indices = send(indices, self.device)
        return trees.select(self._x, indices), trees.select(self._y, indices)

    @property
    def x(self) -> Tree:
        """All inputs; copied where this is a subset."""
        return self._x if self._rows is None else trees.select(self._x, send(self._rows, self.device))

    @property
    def y(self) -> Tree:
        """All targets; copied where this is a subset."""
        return self._y if self._rows is None else trees.select(self._y, send(self._rows, self.device))

    def subset(self, indices: torch.Tensor) -> Tensors:
        """Some of the samples, in the same memory."""
        return Tensors(self._x, self._y, indices if self._rows is None else self._rows[indices])

    def labels(self) -> torch.Tensor | None:
        """The classes (n,), where targets are classes."""
        y = self.y
        return y if isinstance(y, torch.Tensor) and y.ndim == 1 and not y.is_floating_point() else None

    def values(self) -> int:
        """The numbers of one sample's inputs."""
        return sum(tensor[:1].numel() for tensor in trees.leaves(self._x))

    def nbytes(self) -> int:
        """The bytes of the inputs."""
        whole = trees.nbytes(self._x)
        return whole if self._rows is None else whole * len(self._rows) // max(1, trees.length(self._y))

    def to(self, device: torch.device) -> Tensors:
        """The same source on a device."""
        return Tensors(trees.to(self.x, device), trees.to(self.y, device))

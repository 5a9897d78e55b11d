"""A model's outputs and targets of any kind, in the forms that metrics count."""

from __future__ import annotations

from drivetrain.core.lazy import torch
from drivetrain.core.targets import TargetKind


def rows(output: torch.Tensor, target: torch.Tensor, kind: TargetKind | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits (n, classes) and targets (n,) of samples, of pixels or of tokens. A target below 0 does not count.

    Pixels have their classes in dimension 1, (n, classes, height, width); one channel alone says how likely class 1 is.
    """
    if kind == "mask":
        if output.shape[1] == 1:
            output = torch.cat([torch.zeros_like(output), output], 1)
        output = output.movedim(1, -1)
    logits, target = output.reshape(-1, output.shape[-1]), target.reshape(-1)
    return (logits.float() if logits.dtype.itemsize < 4 else logits), target.long()


def probabilities(output: torch.Tensor, kind: TargetKind | None) -> torch.Tensor:
    """Return the probabilities of classes, or of labels, each by itself."""
    values = output.float() if output.dtype.itemsize < 4 else output
    return values.sigmoid() if kind == "labels" else values.softmax(-1)


def count(numbers: torch.Tensor, amounts: torch.Tensor, size: int) -> torch.Tensor:
    """Return the sum of the amounts of each number from 0 to `size` - 1, int64 (size,). torch.bincount waits for the device."""
    return torch.zeros(size, dtype=torch.int64, device=numbers.device).index_add_(0, numbers, amounts.long())

"""Losses over classes, one target for each sample."""

from __future__ import annotations

from drivetrain.core.device import sum_dtype
from drivetrain.core.lazy import torch
from drivetrain.core.option import Share
from drivetrain.loss.base import Loss


class CrossEntropy(Loss):
    """Cross entropy over classes. An evaluation reports it without label smoothing, and the accuracy."""

    metrics = ("loss", "accuracy")
    best = ("accuracy", max)
    takes = ("class",)
    soft_targets = True

    def __init__(self, label_smoothing: Share = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean loss of logits (n, classes) against class indices (n,), or in training also probabilities (n, classes)."""
        if target.is_floating_point():  # torch requires both to have one dtype; the logits may be bfloat16
            dtype = torch.promote_types(output.dtype, target.dtype)
            output, target = output.to(dtype), target.to(dtype)
        return torch.nn.functional.cross_entropy(output, target, label_smoothing=self.label_smoothing)

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Sums of the loss and of the correct samples, and the number of samples (3,)."""
        loss = torch.nn.functional.cross_entropy(output.float(), target, reduction="sum").to(sum_dtype(output.device))
        correct = (output.argmax(-1) == target).sum().to(loss.dtype)
        return torch.stack([loss, correct, torch.full_like(loss, len(target))])

"""The loss that is trained and the sums that an evaluation reports."""

from __future__ import annotations

from drivetrain.lazy import torch
from drivetrain.spec import Part, Share


class CrossEntropy(Part):
    """Cross entropy over classes, mean over the batch; evaluation reports it without smoothing, with the accuracy."""

    metrics = ("loss", "accuracy")
    best = ("accuracy", max)

    def __init__(self, label_smoothing: Share = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean loss of logits (n, classes) against class numbers (n,)."""
        return torch.nn.functional.cross_entropy(output, target, label_smoothing=self.label_smoothing)

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Per-batch sums of `metrics` and, last, the count: float64 (3,). Sums add up exactly over ranks; means do not."""
        loss = torch.nn.functional.cross_entropy(output.float(), target, reduction="sum").double()
        correct = (output.argmax(-1) == target).sum().double()
        return torch.stack([loss, correct, torch.full_like(loss, len(target))])

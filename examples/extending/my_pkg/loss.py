"""loss=focal, and loss=cross_entropy_top2, which is a metric more."""

from __future__ import annotations

from drivetrain.core.lazy import torch
from drivetrain.core.option import NonNegative
from drivetrain.loss import CrossEntropy


class Focal(CrossEntropy):
    """Cross entropy that counts samples less the surer the model is of them (Lin et al. 2017). gamma=0 is cross entropy.

    An evaluation reports what CrossEntropy does.
    """

    soft_targets = False  # a capability: with mixup, which mixes labels, this loss is refused

    def __init__(self, gamma: NonNegative = 2.0) -> None:
        super().__init__()
        self.gamma = gamma

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of logits (n, classes) against class numbers (n,)."""
        loss = torch.nn.functional.cross_entropy(output, target, reduction="none")  # -log p of the right class, (n,)
        return ((1 - torch.exp(-loss)) ** self.gamma * loss).mean()


class CrossEntropyTop2(CrossEntropy):
    """Cross entropy; an evaluation also reports how often the right class is among the two likeliest."""

    metrics = (*CrossEntropy.metrics, "top2_accuracy")

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Sums over a batch, one for each of `metrics`, then the count they are divided by: float64 (4,)."""
        *sums, count = super().sums(output, target)
        right = (output.topk(2).indices == target[:, None]).sum().double()
        return torch.stack([*sums, right, count])

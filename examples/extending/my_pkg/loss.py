"""loss=poly1, and loss=cross_entropy_top2, which is a metric more."""

from __future__ import annotations

from drivetrain.core.lazy import torch
from drivetrain.core.options.option import NonNegative
from drivetrain.loss.classification import CrossEntropy


class Poly1(CrossEntropy):
    """Poly-1 loss (Leng et al. 2022): cross entropy and epsilon × (1 − the probability of the right class).

    An evaluation reports what CrossEntropy does.
    """

    soft_targets = False  # a capability: with mixup, which mixes labels, this loss is refused

    def __init__(self, epsilon: NonNegative = 1.0) -> None:
        super().__init__()
        self.epsilon = epsilon

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of logits (n, classes) against class numbers (n,)."""
        loss = torch.nn.functional.cross_entropy(output, target, reduction="none")  # -log p of the right class, (n,)
        return (loss + self.epsilon * (1 - torch.exp(-loss))).mean()


class CrossEntropyTop2(CrossEntropy):
    """Cross entropy; an evaluation also reports how often the right class is among the two likeliest."""

    metrics = (*CrossEntropy.metrics, "top2_accuracy")

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Sums over a batch, one for each of `metrics`, then the count they are divided by: float64 (4,)."""
        *sums, count = super().sums(output, target)
        right = (output.topk(2).indices == target[:, None]).sum().double()
        return torch.stack([*sums, right, count])

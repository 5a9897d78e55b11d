"""metrics=[balanced_error]"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.core.lazy import torch
from drivetrain.core.options.option import BuildContext
from drivetrain.metrics import Metric

if TYPE_CHECKING:
    from drivetrain.metrics.states import Sums


class BalancedError(Metric):
    """The share of wrong answers among the samples of each class; the mean over the classes."""

    name = "balanced_error"
    takes = ("class",)  # the kinds of targets that it can be computed from: drivetrain.core.step.target_kinds
    better = "min"  # which of two values is better; "max" where nothing is said, None: neither

    def create(self, context: BuildContext) -> Sums:
        from drivetrain.metrics.states import Sums  # imports torch: not before the run is built

        return Sums((2, self.classes))

    def prepare(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a batch adds to the sums: how many samples of each class there are, and how many of them are wrong."""
        there = target[:, None] == torch.arange(self.classes, device=target.device)  # one_hot would wait for the device
        wrong = there & (output.argmax(1) != target)[:, None]
        return (torch.stack([there.sum(0), wrong.sum(0)]),)

    def figures(self, computed: torch.Tensor) -> dict[str, float]:
        there, wrong = computed  # the sums over all batches and ranks
        return {self.name: float((wrong / there)[there > 0].mean())}

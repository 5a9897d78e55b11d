"""Losses of segmentation, which compare regions. Cross entropy and focal loss of each pixel are in classification.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.core.device import sum_dtype
from drivetrain.core.lazy import torch
from drivetrain.core.option import Positive
from drivetrain.core.trees import Tree, shape_of
from drivetrain.loss.base import wide
from drivetrain.loss.classification import IGNORE, OverClasses, check_pixels

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext


class Dice(OverClasses):
    """Soft Dice loss (Milletari et al. 2016): one minus twice the overlap over the sum of both regions.

    It is computed for each image and class from the softmax, with `smooth` added to both sides, and averaged over the classes,
    then over the images that have a pixel that counts. An evaluation reports the loss and the share of right pixels.
    """

    takes = ("mask",)

    def __init__(self, smooth: Positive = 1.0, ignore_index: int = IGNORE) -> None:
        self.smooth, self.ignore_index = smooth, ignore_index

    def setup(self, context: BuildContext) -> None:
        """It has no class weights: each class weighs the same, however few pixels it has."""

    def problem(self, target: Tree, classes: int) -> str | None:
        if target.dim() < 2:
            return f"have shape {shape_of(target)}, and it wants a class for each pixel, such as (n, h, w)"
        return super().problem(target, classes)

    def count(self, target: Tree) -> torch.Tensor:
        return (target != self.ignore_index).flatten(1).any(1).sum().to(sum_dtype(target.device))

    def sum_and_count(self, output: torch.Tensor, target: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        check_pixels(output, target)
        counts = (target != self.ignore_index).unsqueeze(1)
        p = wide(output).softmax(1) * counts
        classes = torch.arange(p.shape[1], device=p.device).view(-1, *[1] * (p.dim() - 2))
        t = (target.unsqueeze(1) == classes) & counts
        overlap = (p * t).flatten(2).sum(2)  # (n, classes)
        both = p.flatten(2).sum(2) + t.flatten(2).sum(2)
        dice = (2 * overlap + self.smooth) / (both + self.smooth)
        per_image = (1 - dice).mean(1)
        return (per_image * counts.flatten(1).any(1)).sum(), self.count(target).to(p.dtype)

    def sums(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        """Sums of the loss and of the shares of right pixels in each image, and the number of images (3,)."""
        dtype = sum_dtype(output.device)
        total, count = self.sum_and_count(output, target)
        counts = target != self.ignore_index
        right = ((output.argmax(1) == target) & counts).flatten(1).sum(1, dtype=dtype)
        accuracy = right / counts.flatten(1).sum(1).clamp(min=1)
        return torch.stack([total.to(dtype), accuracy.sum(), count.to(dtype)])

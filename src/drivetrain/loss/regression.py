"""Losses of regression: one or several numbers for each sample."""

from __future__ import annotations

import math
from collections.abc import Iterator

from drivetrain.core.lazy import torch
from drivetrain.core.machine.device import sum_dtype
from drivetrain.core.options.option import BuildContext, NonNegative, Positive, RunSpec
from drivetrain.core.step.trees import Tree, shape_of
from drivetrain.loss.base import Loss, same_shape, wide
from drivetrain.loss.classification import IGNORE, OverClasses, check_pixels


class Regression(Loss):
    """The base of the losses that compare outputs (n, k) with targets (n, k), or (n, 1) with (n,); the mean is over all."""

    takes = ("values",)
    name: str

    def count(self, target: Tree) -> torch.Tensor:
        return torch.full((), target.numel(), dtype=sum_dtype(target.device), device=target.device)

    def problem(self, target: Tree, classes: int) -> str | None:
        each = target.numel() // len(target) * self.outputs(1)
        if each != classes and classes > 0:
            return f"have shape {shape_of(target)} and fit outputs of size {each}, but the model gives {classes} for each sample"
        if not bool(torch.isfinite(target).all()):
            return "have values that are not finite: leave such samples out"
        return None

    def sum_and_count(self, output: torch.Tensor, target: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        output, target = same_shape(wide(output), target, self.name)
        return self.error(output, target).sum(), self.count(target).to(output.dtype)

    def error(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of each number, in the shape of both."""
        raise self.unwritten("error")


class Mse(Regression):
    """Mean squared error: the outputs estimate the mean; outliers weigh much."""

    name = "mse"

    def error(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square()


class L1(Regression):
    """Mean absolute error: the outputs estimate the median; outliers weigh no more than other targets."""

    changes = "minimizes the mean absolute error, so that the best guess is the median"
    name = "l1"

    def error(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).abs()


class Huber(Regression):
    """Squared up to an error of `delta`, linear beyond it (Huber 1964), as in torch.nn.HuberLoss."""

    changes = "counts large errors linearly, so that outliers count less"
    name = "huber"

    def __init__(self, delta: Positive = 1.0) -> None:
        self.delta = delta

    def error(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.huber_loss(output, target, reduction="none", delta=self.delta)


class Quantile(Regression):
    """Pinball loss (Koenker and Bassett 1978): the model estimates several `quantiles` of each number.

    The model has an output for each number and quantile: (n, numbers × quantiles), the quantiles of the first number first.
    An evaluation also reports the coverage: the share of targets between the lowest and the highest quantile.
    """

    changes = "learns quantiles of the target instead of its mean"
    name = "quantile"
    metrics = ("loss", "coverage")

    def __init__(self, quantiles: list[float] | None = None) -> None:
        self.quantiles = quantiles if quantiles is not None else [0.1, 0.5, 0.9]

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        ascending = sorted(set(self.quantiles)) == self.quantiles
        if not (self.quantiles and ascending and self.quantiles[0] > 0 and self.quantiles[-1] < 1):
            yield f"{self.target_key}.quantiles={self.quantiles}: give ascending numbers between 0 and 1, such as [0.1,0.5,0.9]"

    def outputs(self, classes: int) -> int:
        return classes * len(self.quantiles)

    def sum_and_count(self, output: torch.Tensor, target: object) -> tuple[torch.Tensor, torch.Tensor]:
        above = self._above(output, target)
        total = sum((torch.maximum(q * a, (q - 1) * a).sum() for q, a in zip(self.quantiles, above.unbind(-1), strict=True)))
        return total, self.count(above).to(above.dtype)  # type: ignore[return-value]

    def _above(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        """The distance by which each target is above each of its quantiles (n, numbers, quantiles)."""
        output = wide(output).unflatten(1, (-1, len(self.quantiles)))
        _, target = same_shape(output[..., 0], target, f"quantile with {len(self.quantiles)} quantiles")
        found: torch.Tensor = target.reshape(len(output), -1, 1) - output
        return found

    def sums(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        dtype = sum_dtype(output.device)
        above = self._above(output, target)
        total, _ = self.sum_and_count(output, target)
        covered = (above[..., 0] >= 0) & (above[..., -1] <= 0)
        count = self.count(above)
        return torch.stack([total.to(dtype), covered.sum().to(dtype) * len(self.quantiles), count])


class GaussianNll(Regression):
    """Negative log-likelihood of a normal distribution (Nix and Weigend 1994), as in torch.nn.GaussianNLLLoss.

    The model estimates a mean and the logarithm of a variance for each number: (n, numbers × 2), those of the first number first.
    A variance below `eps` counts as `eps`.
    """

    changes = "also learns the variance of the target, by which errors weigh"
    name = "gaussian_nll"

    def __init__(self, eps: Positive = 1e-6) -> None:
        self.eps = eps

    def outputs(self, classes: int) -> int:
        return 2 * classes

    def sum_and_count(self, output: torch.Tensor, target: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_variance = wide(output).unflatten(1, (-1, 2)).unbind(-1)
        _, target = same_shape(mean, target, self.name)
        log_variance = log_variance.clamp(min=math.log(self.eps))
        losses = (log_variance + (target.view_as(mean) - mean).square() * (-log_variance).exp()) / 2
        return losses.sum(), self.count(target).to(losses.dtype)


class DiceLoss(OverClasses):
    """Soft Dice loss (Milletari et al. 2016): one minus twice the overlap over the sum of both regions.

    It is computed for each image and class from the softmax, with `smooth` added to both sides, and averaged over the classes,
    then over the images with a pixel that counts. An evaluation reports the loss and the share of right pixels.
    """

    takes = ("mask",)

    def __init__(self, smooth: Positive = 1.0, ignore_index: int = IGNORE) -> None:
        self.smooth, self.ignore_index = smooth, ignore_index

    def setup(self, context: BuildContext) -> None:
        """Class weights do not apply: all classes weigh the same, whatever their numbers of pixels."""

    def problem(self, target: Tree, classes: int) -> str | None:
        if target.dim() < 2:
            return f"have shape {shape_of(target)}, and it wants a class for each pixel, such as (n, h, w)"
        return super().problem(target, classes)

    def count(self, target: Tree) -> torch.Tensor:
        found: torch.Tensor = (target != self.ignore_index).flatten(1).any(1).sum().to(sum_dtype(target.device))
        return found

    def sum_and_count(self, output: torch.Tensor, target: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        check_pixels(output, target)
        counts = (target != self.ignore_index).unsqueeze(1)
        p = wide(output).softmax(1) * counts
        classes = torch.arange(p.shape[1], device=p.device).view(-1, *[1] * (p.dim() - 2))
        t = (target.unsqueeze(1) == classes) & counts
        overlap = (p * t).flatten(2).sum(2)  # (n, classes)
        per_image = (1 - self.ratio(overlap, p.flatten(2).sum(2), t.flatten(2).sum(2))).mean(1)
        return (per_image * counts.flatten(1).any(1)).sum(), self.count(target).to(p.dtype)

    def ratio(self, overlap: torch.Tensor, predicted: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The agreement of regions, at most 1, from the sizes of their overlap and of each region, (n, classes)."""
        return (2 * overlap + self.smooth) / (predicted + real + self.smooth)

    def sums(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        """Sums of the loss and of the shares of right pixels in each image, and the number of images (3,)."""
        dtype = sum_dtype(output.device)
        total, count = self.sum_and_count(output, target)
        counts = target != self.ignore_index
        right = ((output.argmax(1) == target) & counts).flatten(1).sum(1, dtype=dtype)
        accuracy = right / counts.flatten(1).sum(1).clamp(min=1)
        return torch.stack([total.to(dtype), accuracy.sum(), count.to(dtype)])


class Tversky(DiceLoss):
    """Tversky loss (Salehi et al. 2017): Dice loss with different weights for false positive and false negative pixels.

    It is one minus overlap / (overlap + alpha × false positives + beta × false negatives), with `smooth` added to both sides.
    With both at 0.5 it is Dice loss with twice the `smooth`.
    """

    changes = "minimizes the overlap's complement, with missed pixels weighing more than pixels too many"

    def __init__(
        self, alpha: NonNegative = 0.3, beta: NonNegative = 0.7, smooth: Positive = 1.0, ignore_index: int = IGNORE
    ) -> None:
        super().__init__(smooth, ignore_index)
        self.alpha, self.beta = alpha, beta

    def ratio(self, overlap: torch.Tensor, predicted: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        errors = self.alpha * (predicted - overlap) + self.beta * (real - overlap)
        return (overlap + self.smooth) / (overlap + errors + self.smooth)

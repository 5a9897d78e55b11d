"""The loss that is trained and the sums that an evaluation reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from drivetrain.core.lazy import torch
from drivetrain.core.option import Option, RunSpec, Share


class Loss(Option):
    """The base of every loss."""

    metrics: tuple[str, ...]  # what an evaluation reports
    best: tuple[str, Callable[[float, float], float]]  # the metric that says which model is the best, and the better of two
    tokens = False  # targets are one for each token of a sequence

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of a micro-batch, 0-d."""
        raise NotImplementedError

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Sums of `metrics` over a batch and, last, the count: float64 (metrics + 1,)."""
        raise NotImplementedError

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.data.tokens and not self.tokens:
            yield (
                f"{run.named('loss')} wants one target for each sample, but {run.named('data')} has one for each token: "
                "set loss=next_token"
            )
        if self.tokens and not run.data.tokens:
            yield (
                f"{run.named('loss')} wants a target for each token, but {run.named('data')} has one for each sample: "
                "set loss=cross_entropy"
            )


class CrossEntropy(Loss):
    """Cross entropy over classes, mean over the batch; evaluation reports it without smoothing, with the accuracy."""

    metrics = ("loss", "accuracy")
    best = ("accuracy", max)
    soft_targets = True

    def __init__(self, label_smoothing: Share = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean loss of logits (n, classes) against class numbers (n,), or in training probabilities (n, classes)."""
        if target.is_floating_point():  # torch wants one type of both; the logits may be bfloat16
            together = torch.promote_types(output.dtype, target.dtype)
            output, target = output.to(together), target.to(together)
        return torch.nn.functional.cross_entropy(output, target, label_smoothing=self.label_smoothing)

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Per-batch sums of `metrics` and, last, the count: float64 (3,). Sums add up exactly over ranks; means do not."""
        loss = torch.nn.functional.cross_entropy(output.float(), target, reduction="sum").double()
        correct = (output.argmax(-1) == target).sum().double()
        return torch.stack([loss, correct, torch.full_like(loss, len(target))])


class NextToken(Loss):
    """Cross entropy of the next token, mean over the tokens; evaluation reports it, and in bits per token, here a byte."""

    metrics = ("loss", "bits_per_byte")
    best = ("bits_per_byte", min)
    tokens = True

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean loss of logits (n, length, classes) against tokens (n, length); targets of -100 (padding) do not count."""
        return _token_loss(output, target, "mean")

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Per-batch sums of `metrics` and, last, the tokens: float64 (3,)."""
        loss = _token_loss(output, target, "sum").double()
        return torch.stack([loss, loss / math.log(2), (target >= 0).sum().double()])


def _token_loss(output: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    logits = output.float() if output.dtype.itemsize < 4 else output  # sixteen bits are too few for a sum over tokens
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)

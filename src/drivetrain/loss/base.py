"""The base of every loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drivetrain.core.lazy import torch
from drivetrain.core.option import Option, RunSpec


class Loss(Option):
    """A loss to train with, and the metrics of an evaluation."""

    metrics: tuple[str, ...]  # names of the metrics that an evaluation reports
    best: tuple[str, Callable[[float, float], float]]  # the metric that ranks models; picks the better of two values
    tokens = False  # whether there is a target for each token of a sequence, not one for each sample
    soft_targets = False  # whether it takes probabilities of classes as targets, as mixup makes them

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

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch, 0-d, to be differentiated."""
        raise NotImplementedError

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Sums over a batch, of `sum_dtype`, (metrics + 1,): one for each of `metrics`, then what they are divided by in the end.

        Sums can be added over batches and ranks; means cannot.
        """
        raise NotImplementedError

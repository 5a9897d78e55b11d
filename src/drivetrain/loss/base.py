"""The base of every loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drivetrain.core.lazy import torch
from drivetrain.core.option import Option, RunSpec
from drivetrain.core.targets import FITTING_LOSS, TargetKind, describe


class Loss(Option):
    """A loss to train with, and the metrics of an evaluation."""

    metrics: tuple[str, ...]  # names of the metrics that an evaluation reports
    best: tuple[str, Callable[[float, float], float]]  # the metric that ranks models; picks the better of two values
    takes: tuple[TargetKind, ...]  # the kinds of targets that it can be computed from
    soft_targets = False  # whether it takes probabilities of classes as targets, as mixup makes them

    def validate(self, run: RunSpec) -> Iterator[str]:
        given = run.data.targets
        if given is not None and given not in self.takes:
            fitting = FITTING_LOSS.get(given)
            yield (
                f"{run.named('loss')} wants {describe(self.takes)}, but {run.named('data')} has {describe((given,))}: "
                + (f"set loss={fitting}" if fitting else "set another loss")
            )

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch, 0-d, to be differentiated."""
        raise NotImplementedError

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Sums over a batch, of `sum_dtype`, (metrics + 1,): one for each of `metrics`, then what they are divided by in the end.

        Sums can be added over batches and ranks; means cannot.
        """
        raise NotImplementedError

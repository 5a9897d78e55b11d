"""Metrics of numbers. They are summed in double precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from drivetrain.core.device import sum_dtype
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import BuildContext, RunSpec
from drivetrain.metrics.base import Metric

if TYPE_CHECKING:
    from drivetrain.metrics.states import State


class _OfValues(Metric):
    """A metric of outputs and targets of one number for each sample, or of several."""

    takes = ("values",)

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if (outputs := run.loss.outputs(1)) != 1:
            yield (
                f"metrics=[{self.name}] compares each value with one output, and {run.named('loss')} gives {outputs} for each: "
                "set metrics=[] select=loss (the loss reports its own figures)"
            )

    def create(self, context: BuildContext) -> State:
        from drivetrain.metrics.states import Sums

        self._dtype = sum_dtype(context.device)
        return Sums()

    def prepare(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the sums over the samples, (5, numbers): of targets, their squares, errors' sizes and squares, and samples."""
        output, target = (t.reshape(len(t), -1).to(self._dtype) for t in (output, target))
        error = output - target
        return (torch.stack([part.sum(0) for part in (target, target**2, error.abs(), error**2, torch.ones_like(error))]),)


class MAE(_OfValues):
    """The mean absolute error."""

    name = "mae"
    better = "min"

    def figures(self, computed: torch.Tensor) -> dict[str, float]:
        return {self.name: float(computed[2].sum() / computed[4].sum())}


class RMSE(_OfValues):
    """The root of the mean squared error."""

    name = "rmse"
    better = "min"

    def figures(self, computed: torch.Tensor) -> dict[str, float]:
        return {self.name: float((computed[3].sum() / computed[4].sum()).sqrt())}


class R2(_OfValues):
    """The coefficient of determination: the share of the targets' variance that the outputs explain; the mean over numbers."""

    name = "r2"

    def figures(self, computed: torch.Tensor) -> dict[str, float]:
        total, squares, _, wrong, samples = computed
        if samples[0] < 2:
            raise UserError("metrics=[r2] cannot be computed of one sample: evaluate on more samples, or take it out")
        spread = squares - total**2 / samples
        # Of targets that are all equal: 1 where they are met, else 0, as in torchmetrics and scikit-learn.
        share = torch.where(spread > 0, 1 - wrong / spread, (wrong == 0).double())
        return {self.name: float(share.mean())}

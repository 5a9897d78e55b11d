"""Metrics of numbers, by torchmetrics. They are summed in double precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.core.device import sum_dtype
from drivetrain.core.lazy import torch
from drivetrain.metrics.base import Metric

if TYPE_CHECKING:
    import torchmetrics

    from drivetrain.core.context import BuildContext


class _OfValues(Metric):
    """A metric of outputs and targets of one number for each sample, or of several."""

    takes = ("values",)

    def create(self, context: BuildContext) -> torchmetrics.Metric:
        self._dtype = sum_dtype(context.device)
        return self.of_torchmetrics().set_dtype(self._dtype)

    def of_torchmetrics(self) -> Any:
        """Make the torchmetrics.Metric."""
        raise NotImplementedError

    def prepare(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, target = (t.reshape(len(t), -1).to(self._dtype) for t in (output, target))
        return (output[:, 0], target[:, 0]) if output.shape[1] == target.shape[1] == 1 else (output, target)


class MAE(_OfValues):
    """The mean absolute error."""

    name = "mae"
    better = "min"

    def of_torchmetrics(self) -> Any:
        from torchmetrics import MeanAbsoluteError

        return MeanAbsoluteError()


class RMSE(_OfValues):
    """The root of the mean squared error."""

    name = "rmse"
    better = "min"

    def of_torchmetrics(self) -> Any:
        from torchmetrics import MeanSquaredError

        return MeanSquaredError(squared=False)


class R2(_OfValues):
    """The coefficient of determination: the share of the targets' variance that the outputs explain; the mean over numbers."""

    name = "r2"

    def of_torchmetrics(self) -> Any:
        from torchmetrics import R2Score

        return R2Score()

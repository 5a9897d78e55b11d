"""Metrics of numbers, by torchmetrics. They are summed in double precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drivetrain.core.device import sum_dtype
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.metrics.base import Metric, Table

if TYPE_CHECKING:
    import torchmetrics

    from drivetrain.core.context import BuildContext


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

    def result(self) -> tuple[dict[str, float], dict[str, Table]]:
        try:
            return super().result()
        except ValueError as error:
            raise UserError(f"metrics=[r2] cannot be computed ({error}): evaluate on more samples, or take it out") from None

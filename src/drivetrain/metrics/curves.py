"""Metrics of the probabilities of a classification, by torchmetrics."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from drivetrain.core.device import sum_dtype
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.option import Bins, BuildContext
from drivetrain.core.trees import Tree
from drivetrain.metrics.base import Metric, Table, count, probabilities, rows

if TYPE_CHECKING:
    import torchmetrics


class _Curve(Metric):
    """The area under a curve of each class against the rest, or of each label; the mean over those that both occur and do not.

    Without `thresholds` it is exact, and all probabilities of the set are kept on the device.
    """

    by_torchmetrics = True
    takes = ("class", "labels")
    needs_real_tensors = "the points of an exact curve are as many as there are different probabilities"

    def __init__(self, thresholds: Bins | None = None) -> None:
        self.thresholds = thresholds

    def setup(self, context: BuildContext) -> None:
        from drivetrain.metrics.states import Sums, place

        super().setup(context)
        self._there = place(Sums((2, self.classes)), context.device, context.parallel)

    def create(self, context: BuildContext) -> torchmetrics.Metric:
        import torchmetrics.classification

        targets = "Multilabel" if self.kind == "labels" else "Multiclass"
        kind = getattr(torchmetrics.classification, targets + type(self).__name__)
        state: torchmetrics.Metric = kind(self.classes, thresholds=self.thresholds, average="none", validate_args=False)
        return state

    def reset(self) -> None:
        super().reset()
        self._there.reset()

    def update(self, output: Tree, target: Tree, batch: MicroBatch | None = None) -> None:
        super().update(output, target)
        of_labels = self.kind == "labels"
        there = (target > 0.5).sum(0) if of_labels else count(target, torch.ones_like(target), self.classes)
        self._there.update(torch.stack([there, len(target) - there]))

    def prepare(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return probabilities(output, self.kind), target.long()

    def figures(self, computed: torch.Tensor) -> dict[str, float]:
        there, absent = self._there.compute()
        values = computed.cpu().double()[(there > 0) & (absent > 0)]
        return {self.name: float(values.mean())}

    def result(self) -> tuple[dict[str, float], dict[str, Table]]:
        with warnings.catch_warnings():  # of classes that do not occur, which are left out here
            warnings.simplefilter("ignore")
            return super().result()


class AUROC(_Curve):
    """The area under the receiver operating characteristic."""

    name = "auroc"


class AveragePrecision(_Curve):
    """The area under the curve of precision against recall."""

    name = "average_precision"


class CalibrationError(Metric):
    """The distance between the probability of the predicted class and the share that is right: the mean over bins of probability.

    It is the expected calibration error (Naeini et al. 2015). Of several labels, that of each label's probability.
    """

    by_torchmetrics = True
    name = "calibration_error"
    takes = ("class", "labels")
    better = "min"

    def __init__(self, bins: Bins = 15) -> None:
        self.bins = bins

    def create(self, context: BuildContext) -> torchmetrics.Metric:
        from torchmetrics.classification import BinaryCalibrationError

        self._dtype = sum_dtype(context.device)
        # The probability of the predicted class is one of "right": so the binary form serves any number of classes.
        return BinaryCalibrationError(n_bins=self.bins, norm="l1", validate_args=False)

    def prepare(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.kind == "labels":
            return probabilities(output, self.kind).flatten().to(self._dtype), target.flatten().long()
        logits, target = rows(output, target, self.kind)
        confidence, predicted = probabilities(logits, self.kind).max(-1)
        return confidence.to(self._dtype), (predicted == target).long()

"""Shipped metrics: ratios of counts, areas under curves, and metrics of language models and of numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine.device import sum_dtype
from drivetrain.core.options.allowed import ColumnName
from drivetrain.core.options.groups import Better
from drivetrain.core.options.option import Bins, BuildContext, Count, RunSpec
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.core.step.trees import Tree
from drivetrain.metrics.base import Metric, TableRecord, count, probabilities, rows

if TYPE_CHECKING:
    import torchmetrics

    from drivetrain.metrics.states import State


Average = Literal["macro", "micro", "weighted"]


class _Counted(Metric):
    """A metric with sums of integers as state."""

    counts = True

    def create(self, context: BuildContext) -> State:
        from drivetrain.metrics.states import Sums

        # A one-channel mask has the classes 0 and 1.
        self.classes = max(self.classes, 2) if self.kind == "mask" else self.classes
        return Sums(self.shape())

    def shape(self) -> tuple[int, ...]:
        """Return the shape of the sums."""
        raise self.unwritten("shape")

    def class_names(self) -> list[str]:
        names = super().class_names()
        return names if len(names) == self.classes else [str(n) for n in range(self.classes)]


class Accuracy(_Counted):
    """The share of samples, pixels or tokens with the right predicted class; for several labels, the share of right labels."""

    name = "accuracy"
    share = True
    takes: tuple[TargetKind, ...] = ("class", "labels", "mask", "tokens", "words")

    def shape(self) -> tuple[int, ...]:
        return (2,)

    def prepare(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.kind == "labels":
            right = (output > 0) == (target > 0.5)
            return (torch.stack([right.sum(), torch.full_like(right.sum(), right.numel())]),)
        logits, target = rows(output, target, self.kind)
        return (torch.stack([self.right(logits, target).sum(), (target >= 0).sum()]),)

    def right(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return which rows are right, bool (n,)."""
        return logits.argmax(-1) == target

    def figures(self, computed: torch.Tensor) -> dict[str, float]:
        right, total = computed.tolist()
        return dict.fromkeys(self.directions, right / total)


class TopK(Accuracy):
    """The share of samples with their class among the model's `k` likeliest."""

    name = "top5"
    takes = ("class", "mask", "tokens", "words")

    def __init__(self, k: Count = 5) -> None:
        self.k = k

    @property
    def directions(self) -> dict[str, Better | None]:
        return {f"top{self.k}": max}

    def right(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        likely = logits.topk(min(self.k, logits.shape[-1]), -1).indices
        return (likely == target[:, None]).any(-1)


class _OfClasses(_Counted):
    """A ratio for each class or label, from counts of right, predicted and actual ones, (3, classes)."""

    takes: tuple[TargetKind, ...] = ("class", "labels", "mask", "words")

    def shape(self) -> tuple[int, ...]:
        return (3, self.classes)

    def prepare(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.kind == "labels":
            predicted, there = output > 0, target > 0.5
            return (torch.stack([(predicted & there).sum(0), predicted.sum(0), there.sum(0)]),)
        logits, target = rows(output, target, self.kind)
        predicted, counts, there = logits.argmax(-1), target >= 0, target.clamp(min=0)
        right = counts & (predicted == target)
        parts = ((there, right), (predicted, counts), (there, counts))
        return (torch.stack([count(numbers, amounts, self.classes) for numbers, amounts in parts]),)


class _Score(_OfClasses):
    """A ratio, averaged over the classes. A class that neither occurs nor is predicted is left out."""

    def __init__(self, average: Average = "macro", positive: ColumnName | int | None = None) -> None:
        self.average, self.positive = average, positive

    @staticmethod
    def ratio(right: torch.Tensor, predicted: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return numerator and denominator."""
        raise NotImplementedError

    def figures(self, computed: torch.Tensor) -> dict[str, float]:
        return {self.name: self.mean(computed)}

    def mean(self, computed: torch.Tensor) -> float:
        computed = computed[:, self._counted]
        if self.average == "micro":
            computed = computed.sum(1, keepdim=True)
        right, predicted, there = computed
        weights = there if self.average == "weighted" else (predicted + there > 0).double()
        return float((divide(*self.ratio(right, predicted, there)) * weights).sum() / weights.sum())


class PrecisionScore(_Score):
    """The share of right ones among the predictions of a class."""

    name = "precision"

    @staticmethod
    def ratio(right: torch.Tensor, predicted: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return right, predicted


class Recall(_Score):
    """The share of a class's members that are found. Its macro average is the balanced accuracy."""

    name = "recall"

    @staticmethod
    def ratio(right: torch.Tensor, predicted: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return right, there


class F1(_Score):
    """The harmonic mean of precision and recall."""

    name = "f1"

    @staticmethod
    def ratio(right: torch.Tensor, predicted: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * right, predicted + there


class IoU(_Score):
    """Intersection over union of the pixels of each class, over the whole set; the mean over the classes."""

    name = "iou"
    takes = ("mask",)

    def __init__(self, background: bool = True) -> None:
        super().__init__()
        self.background = background

    @staticmethod
    def ratio(right: torch.Tensor, predicted: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return right, predicted + there - right

    def figures(self, computed: torch.Tensor) -> dict[str, float]:
        return super().figures(computed if self.background else computed[:, 1:])


class Dice(IoU):
    """Twice the intersection over the sum of the pixels of each class, over the whole set; the mean over the classes."""

    name = "dice"
    ratio = staticmethod(F1.ratio)


class PerClass(_OfClasses):
    """A table: precision, recall and F1 of each class or label (for pixels also IoU), and its count."""

    name = "per_class"

    @property
    def directions(self) -> dict[str, Better | None]:
        return {}

    def figures(self, computed: torch.Tensor) -> dict[str, float]:
        return {}

    def table(self, computed: torch.Tensor) -> TableRecord:
        scores: list[type[_Score]] = [PrecisionScore, Recall, F1, *([IoU] if self.kind == "mask" else [])]
        columns = [divide(*score.ratio(*computed)) for score in scores]
        values = [[*scored, int(n)] for *scored, n in torch.stack([*columns, computed[2]], 1).tolist()]
        unit = {"mask": "pixels"}.get(str(self.kind), "samples")
        return TableRecord(rows=self.class_names(), columns=[*(score.name for score in scores), unit], values=values)


class ConfusionMatrix(_Counted):
    """A table: the number of predictions of each class (columns) for each true class (rows)."""

    name = "confusion_matrix"
    takes = ("class", "labels", "mask", "words")

    @property
    def directions(self) -> dict[str, Better | None]:
        return {}

    def shape(self) -> tuple[int, ...]:
        return (self.classes, 4 if self.kind == "labels" else self.classes)

    def prepare(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.kind == "labels":
            predicted, there = output > 0, target > 0.5
            cells = (predicted & there, predicted & ~there, ~predicted & there, ~predicted & ~there)
            return (torch.stack([cell.sum(0) for cell in cells], 1),)
        logits, target = rows(output, target, self.kind)
        cell = target.clamp(min=0) * self.classes + logits.argmax(-1)
        return (count(cell, target >= 0, self.classes**2).view(self.classes, self.classes),)

    def figures(self, computed: torch.Tensor) -> dict[str, float]:
        return {}

    def table(self, computed: torch.Tensor) -> TableRecord:
        names = self.class_names()
        of_labels = ["true positives", "false positives", "false negatives", "true negatives"]
        return TableRecord(rows=names, columns=of_labels if self.kind == "labels" else names, values=computed.long().tolist())


def divide(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Return the ratio; 0 if nothing is counted."""
    return numerator / denominator.clamp(min=1)


class _Curve(Metric):
    """The area under a curve of each class against the rest, or of each label; the mean over those with positives and negatives.

    Without `thresholds` it is exact, and all probabilities of the set are kept on the device.
    """

    by_torchmetrics = True
    takes = ("class", "labels")
    needs_real_tensors = "an exact curve has a point for each distinct probability"

    def __init__(self, thresholds: Bins | None = None, positive: ColumnName | int | None = None) -> None:
        self.thresholds, self.positive = thresholds, positive

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
        values = computed.cpu().double()[self._counted][((there > 0) & (absent > 0))[self._counted]]
        return {self.name: float(values.mean())}

    def result(self) -> tuple[dict[str, float], dict[str, TableRecord]]:
        with warnings.catch_warnings():  # of absent classes, which are left out here
            warnings.simplefilter("ignore")
            return super().result()


class AUROC(_Curve):
    """The area under the receiver operating characteristic."""

    name = "auroc"


class AveragePrecision(_Curve):
    """The area under the curve of precision against recall."""

    name = "average_precision"


class CalibrationError(Metric):
    """The distance between the predicted class's probability and the share of right answers: the mean over bins of probability.

    It is the expected calibration error (Naeini et al. 2015). For several labels it is that of each label's probability.
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


class Perplexity(Metric):
    """The exponential of the mean loss of a token in nats."""

    name = "perplexity"
    takes = ("tokens",)
    better = "min"

    def create(self, context: BuildContext) -> State:
        from drivetrain.metrics.states import Sums

        self._dtype = sum_dtype(context.device)
        return Sums((2,), self._dtype)

    def prepare(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, tokens = rows(output, target, self.kind)
        nats = torch.nn.functional.cross_entropy(logits, tokens, reduction="sum")  # padding (-100) has no byte count
        return (torch.stack([nats.to(self._dtype), self.amount(tokens).sum().to(self._dtype)]),)

    def amount(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what each token counts, (n,); 0 for padding."""
        return tokens >= 0

    def figures(self, computed: torch.Tensor) -> dict[str, float]:
        nats, tokens = computed.tolist()
        return {self.name: math.exp(min(nats / tokens, 700.0))}  # the exponential of more overflows a float


class BitsPerByte(Perplexity):
    """The loss in bits per byte of the text, comparable between tokenizers.

    `Splits.token_bytes` are the bytes of each token of the vocabulary; without it a token is a byte.
    """

    name = "bits_per_byte"

    def create(self, context: BuildContext) -> State:
        given = context.data.token_bytes
        self._bytes = None if given is None else given.to(context.device)
        return super().create(context)

    def amount(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens >= 0 if self._bytes is None else self._bytes[tokens.clamp(min=0)] * (tokens >= 0)

    def figures(self, computed: torch.Tensor) -> dict[str, float]:
        nats, length = computed.tolist()
        return {self.name: nats / math.log(2) / length}


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
        # If all targets are equal: 1 for exact outputs, else 0, as in torchmetrics and scikit-learn.
        share = torch.where(spread > 0, 1 - wrong / spread, (wrong == 0).double())
        return {self.name: float(share.mean())}

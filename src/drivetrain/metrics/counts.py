"""Metrics that are ratios of counts: of right samples, and of those that are of a class, or predicted to be of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from drivetrain.core.groups import Better
from drivetrain.core.lazy import torch
from drivetrain.core.option import BuildContext, Count
from drivetrain.core.targets import TargetKind
from drivetrain.metrics.base import Metric, Table, count, rows

if TYPE_CHECKING:
    from drivetrain.metrics.states import State

Average = Literal["macro", "micro", "weighted"]


class _Counted(Metric):
    """A metric whose state are sums of integers."""

    counts = True

    def create(self, context: BuildContext) -> State:
        from drivetrain.metrics.states import Sums

        # A mask that the model gives as one channel has the classes 0 and 1.
        self.classes = max(self.classes, 2) if self.kind == "mask" else self.classes
        return Sums(self.shape())

    def shape(self) -> tuple[int, ...]:
        """Return the shape of the sums."""
        raise NotImplementedError

    def class_names(self) -> list[str]:
        names = super().class_names()
        return names if len(names) == self.classes else [str(n) for n in range(self.classes)]


class Accuracy(_Counted):
    """The share of the samples, pixels or tokens whose predicted class is right; of several labels, the share of right ones."""

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

    def figures(self, computed: Any) -> dict[str, float]:
        right, total = computed.tolist()
        return dict.fromkeys(self.directions, right / total)


class TopK(Accuracy):
    """The share whose class is among the `k` that the model finds the most likely."""

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
    """A ratio of each class or label: of those that are right, those predicted and those there are, (3, classes)."""

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

    def __init__(self, average: Average = "macro") -> None:
        self.average = average

    @staticmethod
    def ratio(right: torch.Tensor, predicted: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return numerator and denominator."""
        raise NotImplementedError

    def figures(self, computed: torch.Tensor) -> dict[str, float]:
        return {self.name: self.mean(computed)}

    def mean(self, computed: torch.Tensor) -> float:
        if self.average == "micro":
            computed = computed.sum(1, keepdim=True)
        right, predicted, there = computed
        weights = there if self.average == "weighted" else (predicted + there > 0).double()
        return float((divide(*self.ratio(right, predicted, there)) * weights).sum() / weights.sum())


class Precision(_Score):
    """Of those predicted to be of a class, the share that is."""

    name = "precision"

    @staticmethod
    def ratio(right: torch.Tensor, predicted: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return right, predicted


class Recall(_Score):
    """Of those of a class, the share that is found. Its macro average is the balanced accuracy."""

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
    """A table: precision, recall and F1 of each class or label (of pixels also IoU), and how many there are."""

    name = "per_class"

    @property
    def directions(self) -> dict[str, Better | None]:
        return {}

    def figures(self, computed: torch.Tensor) -> dict[str, float]:
        return {}

    def table(self, computed: torch.Tensor) -> Table:
        scores: list[type[_Score]] = [Precision, Recall, F1, *([IoU] if self.kind == "mask" else [])]
        columns = [divide(*score.ratio(*computed)) for score in scores]
        values = [[*scored, int(n)] for *scored, n in torch.stack([*columns, computed[2]], 1).tolist()]
        unit = {"mask": "pixels"}.get(str(self.kind), "samples")
        return Table(rows=self.class_names(), columns=[*(score.name for score in scores), unit], values=values)


class ConfusionMatrix(_Counted):
    """A table: how many of each class (a row) are predicted to be of each class (a column)."""

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
        cells = target.clamp(min=0) * self.classes + logits.argmax(-1)
        return (count(cells, target >= 0, self.classes**2).view(self.classes, self.classes),)

    def figures(self, computed: torch.Tensor) -> dict[str, float]:
        return {}

    def table(self, computed: torch.Tensor) -> Table:
        names = self.class_names()
        of_labels = ["true positives", "false positives", "false negatives", "true negatives"]
        return Table(rows=names, columns=of_labels if self.kind == "labels" else names, values=computed.long().tolist())


def divide(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Return the ratio; 0 where nothing is counted."""
    return numerator / denominator.clamp(min=1)

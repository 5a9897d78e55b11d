"""Losses over classes: one for each sample, one for each pixel, or any number of labels."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Literal, Self

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine.device import sum_dtype
from drivetrain.core.options.option import BuildContext, NonNegative, RunSpec, Share
from drivetrain.core.step.source import Source
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.core.step.trees import Tree, shape_of
from drivetrain.loss.base import SMALLEST, Loss, same_shape, too_few, wide

logger = logging.getLogger(__name__)


ClassWeights = list[NonNegative] | Literal["balanced"] | None
CHUNK = 256  # samples read at once


def weights_for(given: ClassWeights, source: Source, classes: int, ignore_index: int, key: str) -> torch.Tensor | None:
    """Return the weights (classes,) float32 on the CPU, or None. Raises UserError.

    `balanced` is samples / (classes × samples of the class), as scikit-learn's: each class has the same weight in all. A
    class that does not occur has weight 0.
    """
    if given != "balanced":
        return _given_weights(given, classes, "classes", key)
    counts = torch.zeros(classes, dtype=torch.float64)
    for y in _targets(source, classes, key):
        counts += torch.bincount(y[y != ignore_index].flatten(), minlength=classes)
    return torch.where(counts > 0, counts.sum() / (classes * counts), 0.0).float()


def positive_weights_for(given: ClassWeights, source: Source, labels: int, key: str) -> torch.Tensor | None:
    """Return the weight of each label's positives (labels,); `balanced`: in sum equal to its negatives. Raises UserError."""
    if given != "balanced":
        return _given_weights(given, labels, "labels", key)
    y = torch.cat([*_targets(source, labels, key, of_labels=True)]).double()
    positives = y.sum(0)
    return torch.where(positives > 0, (len(y) - positives) / positives, 1.0).float()


def _given_weights(given: Sequence[float] | None, wanted: int, of: str, key: str) -> torch.Tensor | None:
    if given is not None and len(given) != wanted:
        raise UserError(f"{key}: {len(given)} weights for {wanted} {of}: give one for each")
    return None if given is None else torch.tensor(given, dtype=torch.float32)


def _targets(source: Source, classes: int, key: str, of_labels: bool = False) -> Iterator[torch.Tensor]:
    """Yield all targets of the training data, on the CPU. Known targets are not read; a user's code may change them."""
    if (known := source.labels() if source.own_code is None else None) is not None:
        batches: Iterator[torch.Tensor] = iter([known])
    else:
        logger.info("%s=balanced reads %d training samples to count their classes", key, len(source))
        batches = (source.fetch(indices)[1] for indices in torch.arange(len(source)).split(CHUNK))
    for y in batches:
        shape_is_right = y.dim() == 2 and y.shape[1] == classes if of_labels else not y.is_floating_point()
        if not shape_is_right or (not of_labels and int(y.max()) >= classes):
            raise UserError(f"{key}=balanced counts classes from 0 to {classes - 1}, but the training targets are not such")
        yield y.cpu()


IGNORE = -100  # torch's own


class OverClasses(Loss):
    """The base of the losses that compare logits with class numbers, of samples or of pixels."""

    metrics = ("loss", "accuracy")
    best = ("accuracy", max)
    takes: tuple[TargetKind, ...] = ("class", "mask")
    class_weights: ClassWeights = None
    ignore_index = IGNORE
    weight: torch.Tensor | None = None  # (classes,)

    def resolve(self, run: RunSpec) -> Self:
        # With one class for each sample and no weights, the samples are the items, which the batch counts already.
        return self.with_values(counted=self.class_weights is not None or run.data.targets != "class")

    def setup(self, context: BuildContext) -> None:
        key = f"{self.target_key}.class_weights"
        found = weights_for(self.class_weights, context.data.train, context.data.classes, self.ignore_index, key)
        self.weight = None if found is None else found.to(context.device)

    def count(self, target: Tree) -> torch.Tensor:
        dtype = sum_dtype(target.device)
        if target.is_floating_point():
            return super().count(target)
        counts: torch.Tensor = target != self.ignore_index
        return counts.sum().to(dtype) if self.weight is None else (self.weights_of(target) * counts).sum(dtype=dtype)

    def weights_of(self, target: torch.Tensor) -> torch.Tensor:
        """The weight of each item's class; arbitrary for an ignored item."""
        assert self.weight is not None
        return self.weight[target.long().clamp(min=0, max=len(self.weight) - 1)]

    def problem(self, target: Tree, classes: int) -> str | None:
        if target.is_floating_point() and self.soft_targets and target.dim() > 1:
            low, high = (float(each) for each in target.aminmax())
            if low < 0 or high > 1:
                return (
                    f"are numbers from {low:.4g} to {high:.4g}, and it wants classes or their probabilities: set task=regression"
                )
            if (most := float(target.sum(1).max())) > 1.01:
                return f"sum to {most:.4g} in a sample, and it wants probabilities: set task=multilabel where they are labels"
            return None
        if target.is_floating_point():
            return "are numbers with fractions; the loss takes class numbers (int64): set loss=mse for regression"
        if target.dtype not in (torch.int64, torch.uint8):
            return f"are {target.dtype}; the loss takes class numbers (int64): convert them in your data"
        if target.dim() == 2 and target.shape[1] == 1 and classes > 1:
            return f"have shape {shape_of(target)}, and it wants one class number for each sample, (n,): give y[0] instead of y"
        low, high = lowest_and_highest(target, self.ignore_index)
        if target.dim() == 2 and target.shape[1] == classes and 0 <= low <= high <= 1:
            return f"have shape {shape_of(target)}, a 0 or a 1 for each class: set loss=bce for labels"
        if low < 0 or high >= classes:
            return f"{_beyond(low, high, classes)}, or set {self.target_key}.ignore_index to the number to leave out"
        return None

    def output_problem(self, output: tuple[int, ...], classes: int) -> str | None:
        return too_few(output[1] if len(output) > 1 else 1, classes)

    def sums(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        """Sums of the loss, without smoothing and class weights, and of correct answers; the number of samples or pixels (3,)."""
        dtype = sum_dtype(output.device)
        output, classes = wide(output), target
        if target.is_floating_point():  # probabilities of classes
            output, target = _one_dtype(output, target)
            classes = target.argmax(1)
        loss = self.plain_sum(output, target)
        counts = classes != self.ignore_index
        correct = ((output.argmax(1) == classes) & counts).sum()
        return torch.stack([loss.to(dtype), correct.to(dtype), counts.sum().to(dtype)])

    def plain_sum(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The sum of the loss without smoothing and class weights, 0-d."""
        return torch.nn.functional.cross_entropy(output, target, reduction="sum", ignore_index=self.ignore_index)


class CrossEntropy(OverClasses):
    """Cross entropy over classes, of samples or of pixels. An evaluation reports it without smoothing and class weights.

    Targets of `ignore_index` do not count. `class_weights` multiply each item's loss by the weight of its class, and the mean
    is over these weights, as torch's. In training, `z_loss` adds that multiple of the squared logsumexp of each item's logits:
    outputs stay near probabilities, and 16 bits suffice for them (PaLM, Chowdhery et al. 2022).
    """

    soft_targets = True

    def __init__(
        self,
        label_smoothing: Share = 0.0,
        class_weights: ClassWeights = None,
        ignore_index: int = IGNORE,
        z_loss: NonNegative = 0.0,
    ) -> None:
        self.label_smoothing, self.class_weights, self.ignore_index = label_smoothing, class_weights, ignore_index
        self.z_loss = z_loss

    def __call__(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        """Mean loss of logits (n, classes) against class indices (n,), or in training also probabilities (n, classes).

        For pixels the logits are (n, classes, h, w), and the targets (n, h, w).
        """
        if self.counted:
            return super().__call__(output, target)
        if target.is_floating_point():
            output, target = _one_dtype(output, target)
        loss = torch.nn.functional.cross_entropy(
            output, target, label_smoothing=self.label_smoothing, ignore_index=self.ignore_index
        )
        if not self.z_loss:
            return loss
        return loss + self.z_loss * self._squares(output, target) / self.count(target).to(loss.dtype).clamp(min=SMALLEST)

    def sum_and_count(self, output: torch.Tensor, target: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        output = wide(output)
        if target.is_floating_point():
            output, target = _one_dtype(output, target)
        else:
            check_pixels(output, target)
        weight = None if self.weight is None else self.weight.to(output.dtype)
        total = torch.nn.functional.cross_entropy(
            output, target, weight, reduction="sum", label_smoothing=self.label_smoothing, ignore_index=self.ignore_index
        )
        if self.z_loss:
            total = total + self.z_loss * self._squares(output, target)
        return total, self.count(target).to(total.dtype)

    def _squares(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The sum of the items' squared logsumexp, with the loss's weights, 0-d."""
        squares = wide(output).logsumexp(1).square()
        if target.is_floating_point():
            return squares.sum()
        if self.weight is not None:
            squares = squares * self.weights_of(target).to(squares.dtype)
        return squares.masked_fill(target == self.ignore_index, 0).sum()


class Focal(OverClasses):
    """Focal loss (Lin et al. 2017), (1 − p)^gamma times the cross entropy: items that are already right count less.

    Its mean is over all items that are not ignored; with `class_weights` over their weights. An evaluation reports it without
    class weights.
    """

    changes = "gives well-classified samples less weight"

    def __init__(self, gamma: NonNegative = 2.0, class_weights: ClassWeights = None, ignore_index: int = IGNORE) -> None:
        self.gamma, self.class_weights, self.ignore_index = gamma, class_weights, ignore_index

    def sum_and_count(self, output: torch.Tensor, target: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        check_pixels(output, target)
        focal = self._focal(wide(output), target)
        if self.weight is not None:
            focal = focal * self.weights_of(target).to(focal.dtype)
        return focal.sum(), self.count(target).to(focal.dtype)

    def plain_sum(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self._focal(output, target).sum()

    def _focal(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(output, target, reduction="none", ignore_index=self.ignore_index)
        return (1 - torch.exp(-loss)).clamp(min=SMALLEST) ** self.gamma * loss  # a power's gradient at 0 may be infinite


class Bce(Loss):
    """Binary cross entropy of each label, for samples with any number of labels. The mean is over samples and labels.

    A class counts as labels with that one present ("ResNet strikes back", Wightman et al. 2021).
    `pos_weight` multiplies the cost of present labels, as torch's does, for rare labels. An evaluation reports the loss without
    it and without smoothing and threshold, and the share of right labels or classes.
    """

    metrics = ("loss", "label_accuracy")
    takes: tuple[TargetKind, ...] = ("labels", "class")
    soft_targets = True
    of_classes = False
    labels = 1  # labels of a sample whose target is its class
    weight: torch.Tensor | None = None  # (labels,)

    def __init__(
        self, label_smoothing: Share = 0.0, pos_weight: ClassWeights = None, target_threshold: Share | None = None
    ) -> None:
        self.label_smoothing, self.pos_weight, self.target_threshold = label_smoothing, pos_weight, target_threshold

    def resolve(self, run: RunSpec) -> Self:
        if run.data.targets != "class":
            return self.with_values(of_classes=False)
        return self.with_values(of_classes=True, metrics=("loss", "accuracy"), best=("accuracy", max))

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.of_classes and self.pos_weight is not None:
            yield (
                f"{self.target_key}.pos_weight is for samples with any number of labels, and {run.named('data')} has one class "
                f"for each: set it to null, or loss=cross_entropy, which has class_weights"
            )

    def setup(self, context: BuildContext) -> None:
        key, self.labels = f"{self.target_key}.pos_weight", context.data.classes
        found = positive_weights_for(self.pos_weight, context.data.train, context.data.classes, key)
        self.weight = None if found is None else found.to(context.device)

    def count(self, target: Tree) -> torch.Tensor:
        each = self.labels if target.dim() == 1 and self.of_classes else 1
        return torch.full((), target.numel() * each, dtype=sum_dtype(target.device), device=target.device)

    def problem(self, target: Tree, classes: int) -> str | None:
        if self.of_classes and not target.is_floating_point():
            low, high = lowest_and_highest(target, IGNORE)
            return _beyond(low, high, classes) if low < 0 or high >= classes else None
        if target.dim() != 2 or target.shape[1] != classes:
            return f"have shape {shape_of(target)}, and it wants a 0 or a 1 for each of the {classes} labels, (n, {classes})"
        low, high = torch.stack([target.min(), target.max()]).tolist()
        if low < 0 or high > 1:
            return f"go from {low:g} to {high:g}, and it wants a 0 or a 1 for each label"
        return None

    def sum_and_count(self, output: torch.Tensor, target: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        output, target = self._labels(output, target)
        smooth = target if self.target_threshold is None else (target > self.target_threshold).to(target.dtype)
        if self.label_smoothing:
            toward = 1 / output.shape[1] if self.of_classes else 1 / 2
            smooth = smooth * (1 - self.label_smoothing) + self.label_smoothing * toward
        total = self.cost(output, smooth, None if self.weight is None else self.weight.to(output.dtype))
        return total, self.count(target).to(total.dtype)

    def cost(self, output: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of the loss over labels (n, labels), 0-d; `weight` (labels,) multiplies it where a label is present."""
        return torch.nn.functional.binary_cross_entropy_with_logits(output, target, pos_weight=weight, reduction="sum")

    def sums(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        dtype = sum_dtype(output.device)
        output, target = self._labels(output, target)
        loss = self.cost(output, target)
        labels = self.count(target)
        correct = ((output > 0) == (target > 0.5)).sum().to(dtype)
        if self.of_classes:  # finally divided by the number of labels
            correct = (output.argmax(1) == target.argmax(1)).sum().to(dtype) * output.shape[1]
        return torch.stack([loss.to(dtype), correct, labels])

    def _labels(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and labels in one shape and dtype; a class becomes labels with only that class present."""
        output = wide(output)
        if self.of_classes and target.dim() == 1:
            target = target.unsqueeze(1) == torch.arange(output.shape[1], device=target.device)
        return same_shape(output, target, type(self).__name__.lower())


class Asymmetric(Bce):
    """Asymmetric loss of labels (Ridnik et al. 2021): absent labels, which are most, count less than present ones.

    With p the probability of a label it costs (1 − p)^gamma_pos × −log p where it is present, and q^gamma_neg × −log(1 − q) where
    it is absent, q = max(p − clip, 0). The mean is over samples and labels.
    """

    changes = "counts absent labels less, the more so the surer the model is of their absence"
    takes = ("labels",)

    def __init__(self, gamma_neg: NonNegative = 4.0, gamma_pos: NonNegative = 1.0, clip: Share = 0.05) -> None:
        super().__init__()
        self.gamma_neg, self.gamma_pos, self.clip = gamma_neg, gamma_pos, clip

    def cost(self, output: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        log = torch.nn.functional.logsigmoid
        p, absent = output.sigmoid(), (torch.sigmoid(-output) + self.clip).clamp(max=1)
        log_absent = absent.log() if self.clip else log(-output)
        # A power's gradient at 0 may be infinite.
        present = (1 - p).clamp(min=SMALLEST) ** self.gamma_pos * log(output)
        return -(target * present + (1 - target) * (1 - absent).clamp(min=SMALLEST) ** self.gamma_neg * log_absent).sum()


def _beyond(low: int, high: int, classes: int) -> str:
    return (
        f"are class numbers from {low} to {high}, but the model has {classes} outputs, for classes 0 to {classes - 1}: number "
        "the classes from 0, say how many there are (data.classes)"
    )


def lowest_and_highest(target: torch.Tensor, ignore_index: int) -> tuple[int, int]:
    """The lowest and the highest counted class number; 0 without any."""
    counted = torch.where(target == ignore_index, 0, target)
    low, high = torch.stack([counted.min(), counted.max()]).tolist()
    return low, high


def _one_dtype(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and probabilities in one dtype, which torch requires; the logits may be bfloat16."""
    dtype = torch.promote_types(output.dtype, target.dtype)
    return output.to(dtype), target.to(dtype)


def check_pixels(output: torch.Tensor, target: torch.Tensor) -> None:
    """Raise UserError if logits (n, classes, …) and class numbers (n, …) differ in samples or pixels."""
    if output.shape[:1] + output.shape[2:] != target.shape:
        raise UserError(
            f"the loss wants logits (n, classes, …) for class numbers (n, …), but the model's output has shape "
            f"{shape_of(output)} and the targets have {shape_of(target)}: give the model an output for each of them"
        )

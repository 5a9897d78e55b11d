"""The base of every loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine.device import sum_dtype
from drivetrain.core.options import groups
from drivetrain.core.options.option import BuildContext, Option, RunSpec
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.target_kinds import FITTING_LOSS, TargetKind, describe, unsaid
from drivetrain.core.step.trees import Forward, Tree, shape_of

if TYPE_CHECKING:
    from drivetrain.core.step.source import Augmentation

SHARES = (
    "accuracy",
    "label_accuracy",
    "coverage",
)  # metrics that are a share of answers
SMALLEST = 1e-12  # a sum over no items is 0, and 0 / SMALLEST is 0


class Loss(Option, groups.Loss):
    """A loss to train with, and the metrics of an evaluation.

    A loss defines `sum_and_count`, and its mean follows from it. If the number of averaged items depends only on the batch's
    targets, it is `counted`, and `count` returns the number: the step then weights micro-batches and ranks by it.
    """

    changes = "minimizes another loss"
    why_fixed: ClassVar[str] = "evaluations of two losses could not be compared"
    takes: tuple[TargetKind, ...]  # the kinds of targets that it accepts
    counted = False  # True if only the targets determine its number of items, such as pixels without ignored ones
    target_key = "loss"  # the key of its settings, for messages

    @property
    def counting(self) -> tuple[str, ...]:
        """Its metrics that count right and wrong answers."""
        return tuple(name for name in self.metrics if name in SHARES)

    def validate(self, run: RunSpec) -> Iterator[str]:
        given = run.data.targets
        if given is None or given in self.takes:
            return
        if not self.takes:
            yield unsaid(f"{run.named('loss')} ({type(self).__name__})")
        else:
            fitting = FITTING_LOSS.get(given)
            yield (
                f"{run.named('loss')} wants {describe(self.takes)}, but {run.named('data')} has {describe((given,))}: "
                + (f"set loss={fitting}" if fitting else "set another loss")
            )

    def setup(self, context: BuildContext) -> None:
        """Prepare this copy for its run, on the run's device, with weights counted from the training data."""

    def read(self, model: torch.nn.Module, context: BuildContext) -> Iterator[str]:
        """Prepare to read parts of the model other than its output. Yields lines to log. Raises UserError."""
        return iter(())

    def input_shape(self, shape: Tree) -> Tree:
        """Return the shape of one input to the model, for data with inputs of this `shape`."""
        return shape

    def steps(self, data: object) -> tuple[Augmentation, ...]:
        """Return its random step for the samples of each set, such as hiding tokens. Raises UserError."""
        return ()

    def add_parameters(self, model: torch.nn.Module) -> None:
        """Add the loss's trained parameters to the model, so that they are saved with it."""

    def of_phase(self, name: str) -> Loss:
        """Return the loss of a phase of the updates."""
        return self

    def step(self, forward: Forward, batch: MicroBatch) -> torch.Tensor:
        """Run the forward on a micro-batch's inputs, and return the mean loss, 0-d, to be differentiated."""
        return self(forward(batch.x), batch.y)

    def evaluate(self, forward: Forward, batch: MicroBatch, need_output: bool) -> tuple[Tree, torch.Tensor]:
        """Run the forward of an evaluation; return its output, if needed, and the `sums` of the batch."""
        output = forward(batch.x)
        return output, self.sums(output, batch.y)

    def __call__(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        """The differentiable mean loss of a batch, 0-d; 0 if no item of it counts."""
        total, count = self.sum_and_count(output, target)
        return total / count.clamp(min=SMALLEST)

    def sum_and_count(self, output: torch.Tensor, target: object) -> tuple[torch.Tensor, torch.Tensor]:
        """The differentiable sum of the loss over a batch's items, and their number, both 0-d."""
        raise self.unwritten("sum_and_count")

    def count(self, target: object) -> torch.Tensor:
        """The number of items in the mean of a batch, 0-d."""
        device = trees.first(target).device
        return torch.full((), trees.length(target), dtype=sum_dtype(device), device=device)

    def items(self, batch: MicroBatch) -> torch.Tensor:
        """The number of items of a micro-batch, by `count`, 0-d; for a sum of several losses (losses,)."""
        return self.count(batch.y)

    def problem(self, target: object, classes: int) -> str | None:
        """The fault in the first micro-batch's targets, as the rest of a sentence beginning "the targets"; None: no fault.

        It may read from the device.
        """
        return None

    def sums(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        """Sums over a batch, of `sum_dtype`, (metrics + 1,): one for each of `metrics`, then the number to divide them by.

        Sums can be added over batches and ranks; means cannot.
        """
        total, count = self.sum_and_count(output, target)
        dtype = sum_dtype(output.device)
        return torch.stack([total.to(dtype), count.to(dtype)])

    def evaluated(self, sums: list[float]) -> dict[str, float]:
        """The metrics of an evaluation from the `sums` of all its batches."""
        *totals, count = sums
        return {name: total / count for name, total in zip(self.metrics, totals, strict=True)}

    def evaluation_sums(self) -> int:
        """The length of `sums`."""
        return len(self.metrics) + 1


def wide(output: torch.Tensor) -> torch.Tensor:
    """The output in float32 if it has 16 bits: 16 are too few for exponentials and for sums over many items."""
    return output.float() if output.dtype.itemsize < 4 else output


def same_shape(output: torch.Tensor, target: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and target in one shape and dtype: (n, 1) and (n,) fit each other. Raises UserError; nothing is broadcast."""
    if output.dim() == target.dim() + 1 and output.shape[-1] == 1:
        output = output.squeeze(-1)
    elif target.dim() == output.dim() + 1 and target.shape[-1] == 1:
        target = target.squeeze(-1)
    if output.shape != target.shape:
        raise UserError(
            f"loss={name} compares each output with one target, but the model's output has shape {shape_of(output)} and the "
            f"targets have {shape_of(target)}: give the model as many outputs as a sample has targets"
        )
    return output, target.to(output.dtype)


def too_few(outputs: int, classes: int, of: str = "classes") -> str | None:
    """The problem of a model with fewer outputs than the data has classes; None if it has enough."""
    return f"{outputs} outputs for the {classes} {of}" if outputs < classes else None


class PartedLoss(Loss):
    """A loss that logs its parts as loss_<name>, each weighted by its share of the update's items."""

    counted = True

    def __init__(self) -> None:
        self.running: dict[str, torch.Tensor] = {}

    def begin(self, device: torch.device, *names: str) -> None:
        """Start the running sums of these parts. All ranks log the same parts, even ranks that compute no loss (pipeline)."""
        self.running = {name: torch.zeros((), device=device) for name in names}

    def parts(self) -> dict[str, torch.Tensor]:
        return {f"loss_{name}": total for name, total in self.running.items()}

    def log(self, name: str, value: torch.Tensor) -> None:
        """Add a part's value, already multiplied by its share, to its running sum."""
        if name not in self.running:
            self.running[name] = torch.zeros((), device=value.device)
        self.running[name].add_(value.detach())

"""The base of every metric: an option that accumulates batches and returns figures of the whole set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Self, TypedDict

from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.lazy import torch
from drivetrain.core.options import groups
from drivetrain.core.options.groups import Better
from drivetrain.core.options.option import BuildContext, Effect, Option, RunSpec, needs_extra
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.target_kinds import TargetKind, describe, unsaid
from drivetrain.core.step.trees import Tree

DIRECTIONS: dict[str, Better] = {"min": min, "max": max}
EXTRA = "metrics"  # the extra of drivetrain's package with torchmetrics


class TableRecord(TypedDict):
    """An evaluation's table, in the form of result.json."""

    rows: list[str]  # their names
    columns: list[str]
    values: list[list[float]]  # row by row


class Metric(Option, groups.Metric):
    """A metric of an evaluation. `update` takes each batch; `figures` and `table` give the result over all ranks.

    Every sample counts once on any number of ranks: sums and counts are joined at the end, never means.
    """

    why_fixed: ClassVar[str] = "the evaluations of a run have the same metrics"
    name: str  # of its option, and of its figure
    by_torchmetrics: ClassVar[bool] = False
    counts: ClassVar[bool] = False  # True if its figures count right and wrong answers
    share: ClassVar[bool] = False  # True if its figure is the share of right answers
    takes: tuple[TargetKind, ...] = ()  # the accepted kinds of targets
    better: Literal["min", "max"] | None = "max"  # the better direction of its value; None: neither
    kind: TargetKind | None = None  # of the run's targets
    positive: str | int | None = None  # the class that counts alone; None: all
    _counted: slice | list[int] = slice(None)  # the numbers of the counted classes

    def effect_as_set(self) -> Effect:
        """Return "exact": it only watches."""
        return "exact"

    @property
    def directions(self) -> dict[str, Better | None]:
        """Its figures by name, with their better direction."""
        return {self.name: None if self.better is None else DIRECTIONS[self.better]}

    def resolve(self, run: RunSpec) -> Self:
        both = [kind for kind in self.takes if kind in run.loss.takes]
        return self.with_values(kind=run.target_kind or (both[0] if len(both) == 1 else None))

    def validate(self, run: RunSpec) -> Iterator[str]:
        if self.by_torchmetrics:
            yield from needs_extra("torchmetrics", EXTRA, f"metrics=[{self.name}]")
        if not self.takes:
            yield unsaid(f"metrics=[{self.name}] ({type(self).__name__})")
        elif self.kind is None:
            yield (
                f"metrics=[{self.name}] has to know what the targets of {run.named('data')} are, and neither the data nor "
                f"{run.named('loss')} says it: set data.targets={self.takes[0]}"
                + (f" (or {', '.join(self.takes[1:])})" if len(self.takes) > 1 else "")
            )
        elif self.kind not in self.takes:
            yield (
                f"metrics=[{self.name}] measures {describe(self.takes)}, but the targets of {run.named('data')} and "
                f"{run.named('loss')} are {describe((self.kind,))}: take it out of metrics; "
                f"{', '.join(_fitting(self.kind))} would fit"
            )

    def setup(self, context: BuildContext) -> None:
        from drivetrain.metrics.states import place

        self.classes, self.names = context.data.classes, context.data.names
        if self.positive is not None:
            names, wanted = self.class_names(), str(self.positive)
            if wanted not in names:
                raise UserError(f"metrics.{self.name}.positive={wanted} is no class of the data: {did_you_mean(wanted, names)}")
            self._counted = [names.index(wanted)]
        self.state = place(self.create(context), context.device, context.parallel)

    def create(self, context: BuildContext) -> Any:
        """Make the State or the torchmetrics.Metric for the values of `prepare`."""
        raise self.unwritten("create")

    def prepare(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a batch's arguments for the state's update. Must not wait for the device."""
        return output, target

    def reset(self) -> None:
        """Forget the batches so far."""
        self.state.reset()

    def update(self, output: Tree, target: Tree, batch: MicroBatch | None = None) -> None:
        """Take a batch: the model's output and the targets, both in the data's units."""
        self.state.update(*self.prepare(output, target))

    @property
    def tried_on(self) -> int:
        """The number of samples for its trial before training."""
        return 2

    @property
    def needs_output(self) -> bool:
        """True if it can measure the model's output for the batch."""
        return True

    def check(self, output: Tree, target: Tree, batch: MicroBatch) -> None:
        """Take an example, and forget it. An exception shows that the metric cannot take the model's output."""
        self.reset()
        self.update(output, target, batch)
        self.reset()

    def result(self) -> tuple[dict[str, float], dict[str, TableRecord]]:
        """Return the figures and the tables by name, over all ranks. Called on all ranks."""
        computed = self.state.compute()
        table = self.table(computed)
        return self.figures(computed), {} if table is None else {self.name: table}

    def figures(self, computed: Any) -> dict[str, float]:
        """Return the figures by name, from the state's result."""
        return {self.name: float(computed)}

    def table(self, computed: Any) -> TableRecord | None:
        """Return the table from the state's result, or None."""
        return None

    def class_names(self) -> list[str]:
        """Return the names of the classes or labels: the data's, or their numbers."""
        return [str(name) for name in self.names or range(self.classes)]


def _fitting(kind: TargetKind) -> Sequence[str]:
    """Return the names of the metrics for such targets."""
    options = [Metric]
    for option in options:
        options += option.__subclasses__()
    return sorted({o.name for o in options if "name" in vars(o) and kind in o.takes and not o.__module__.endswith(".own")})


def rows(output: torch.Tensor, target: torch.Tensor, kind: TargetKind | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits (n, classes) and targets (n,) of samples, of pixels or of tokens. A target below 0 does not count.

    Pixels have their classes in dimension 1, (n, classes, height, width); a single channel holds the logit of class 1.
    """
    if kind == "mask":
        if output.shape[1] == 1:
            output = torch.cat([torch.zeros_like(output), output], 1)
        output = output.movedim(1, -1)
    logits, target = output.reshape(-1, output.shape[-1]), target.reshape(-1)
    return (logits.float() if logits.dtype.itemsize < 4 else logits), target.long()


def probabilities(output: torch.Tensor, kind: TargetKind | None) -> torch.Tensor:
    """Return the probabilities of classes, or separately of labels."""
    values = output.float() if output.dtype.itemsize < 4 else output
    return values.sigmoid() if kind == "labels" else values.softmax(-1)


def count(numbers: torch.Tensor, amounts: torch.Tensor, size: int) -> torch.Tensor:
    """Return the sum of the amounts of each number from 0 to `size` - 1, int64 (size,). torch.bincount waits for the device."""
    return torch.zeros(size, dtype=torch.int64, device=numbers.device).index_add_(0, numbers, amounts.long())

"""parallel=local_sgd"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.core.lazy import torch
from drivetrain.core.options.option import Count, RunSpec
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.step import Step, WrappingStep
from drivetrain.parallel.process_group import ProcessGroupStrategy

if TYPE_CHECKING:
    from drivetrain.core.options.context import BuildContext


@dataclass(kw_only=True, eq=False)
class LocalSgd(ProcessGroupStrategy):
    """Ranks train by themselves and average their weights every `every` updates and at the end of each epoch (Stich 2019).

    The optimizer's state stays each rank's own; a checkpoint has rank 0's.
    """

    effect = "changes"
    changes = "ranks train by themselves, and average their weights every few updates"

    every: Count = 8

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if run.precision.scales_loss:
            yield (
                f"parallel=local_sgd and {run.named('precision')} exclude each other (an overflow on one rank would skip an "
                "update there alone, and the ranks would no longer average together): set precision=bf16"
            )

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        progress, last = context.progress, context.horizon.updates
        return AveragingStep(
            step,
            is_due=lambda: (progress.updates + 1) % self.every == 0 or progress.updates + 1 == last,
            average=lambda: self.average(context.model),
        )

    def average(self, model: torch.nn.Module) -> None:
        """Give all ranks the mean of their weights."""
        import torch.distributed as dist

        for p in model.parameters():
            dist.all_reduce(p.detach())
            p.detach().div_(self.world.size)


@dataclass(eq=False)
class AveragingStep(WrappingStep):
    """A step that averages the weights after some of its updates."""

    is_due: Callable[[], bool]  # whether the update that is about to be made is one of them
    average: Callable[[], None]
    epoch_end: bool = False

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        self.epoch_end = batch.epoch_end
        self.inner.micro_batch(batch, loss_sum)

    def update(self) -> bool:
        made = self.inner.update()
        if made and (self.epoch_end or self.is_due()):
            self.average()
        return made

"""A step that sees all micro-batches of an update before the first forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from drivetrain.core.step import streams, trees
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.modules import buffers_kept
from drivetrain.core.step.step import Step, WrappingStep
from drivetrain.core.step.trees import Tree
from drivetrain.loss.base import SMALLEST, Loss
from drivetrain.loss.embedding import ComparingLoss, Gathered, Gradient, floats
from drivetrain.parallel.base import Parallel
from drivetrain.precision.base import Precision


class Passes:
    """Runs forward and backward of an update's micro-batches, one after the other."""

    def __call__(self, step: Step, batches: list[MicroBatch], loss_sum: torch.Tensor) -> None:
        for batch in batches:
            step.micro_batch(batch, loss_sum)

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> Passes:
        """Return a copy with another forward of the model."""
        return self


@dataclass(eq=False)
class Weighed(Passes):
    """Weights each micro-batch by its share of the update's items (pixels, class weights), over all micro-batches and ranks.

    For losses that average over items counted in the targets. All targets arrive before the first forward, so the weights are
    exact from the start. The mean equals the mean of one big batch, with any precision, strategy and clipping. The counts are
    summed over the ranks on the device, and nothing is read back.
    """

    loss: Loss
    parallel: Parallel

    def __call__(self, step: Step, batches: list[MicroBatch], loss_sum: torch.Tensor) -> None:
        super().__call__(step, self._shared(batches), loss_sum)

    def _shared(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches of an update with their weights. A filler batch keeps its weight 0."""
        counts = torch.stack([self.loss.items(batch) * batch.weight.sign() for batch in batches])
        total = self.parallel.all_reduce_sum(counts.sum(0))
        shares = (counts * self.parallel.data_world.size / total.clamp(min=SMALLEST)).to(batches[0].weight.dtype)
        rows = zip(batches, shares.unbind(), strict=True)
        if counts.dim() == 1:
            return [replace(batch, weight=share) for batch, share in rows]
        # A sum of losses multiplies by the shares itself, each part by its own.
        return [replace(batch, weight=torch.ones_like(batch.weight), shares=share) for batch, share in rows]


@dataclass(eq=False)
class TwoPasses(Passes):
    """Computes a loss that compares samples over all micro-batches and ranks: exactly the loss of one big batch.

    One micro-batch takes one forward. With several, a first forward of each without gradients computes the embeddings, the loss
    computes their gradients, and a second forward of each backpropagates these (GradCache, Gao et al. 2021). Both forwards draw
    the same random numbers, and buffers (BatchNorm's statistics) change only in the second.
    """

    loss: ComparingLoss
    forward: Callable[..., Tree]
    model: torch.nn.Module
    precision: Precision

    def __call__(self, step: Step, batches: list[MicroBatch], loss_sum: torch.Tensor) -> None:
        targets: list[Gathered] = [self._target(batch) for batch in batches]
        if len(batches) == 1:
            weight = torch.ones_like(batches[0].weight)
            step.micro_batch(replace(batches[0], y=targets[0], weight=weight), loss_sum)
        else:
            self._in_two_passes(step, batches, _joined(targets), loss_sum)

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> Passes:
        return replace(self, forward=forward)

    def _target(self, batch: MicroBatch) -> Gathered:
        """The micro-batch's targets; a filler batch (weight 0) has no valid sample."""
        return Gathered(batch.y if self.loss.views == 1 else None, (batch.weight > 0).repeat(trees.length(batch.x)))

    def _in_two_passes(self, step: Step, batches: list[MicroBatch], gathered: Gathered, loss_sum: torch.Tensor) -> None:
        random_states, found = [], []
        with torch.no_grad(), buffers_kept(self.model), self.precision.autocast():
            for batch in batches:
                random_states.append(streams.state())
                found.append(self.loss.embeddings(self.forward(self.loss.joined(batch.x))))
        given = [leaf.requires_grad_() for each in found for leaf in floats(each)]
        loss = self.loss.over_ranks(trees.concatenate(found), gathered)
        gradients = iter(torch.autograd.grad(loss, given, materialize_grads=True))
        loss_sum += loss.detach()
        unused = torch.zeros_like(loss_sum)
        for batch, state, each in zip(batches, random_states, found, strict=True):
            streams.restore(state)
            target: Tree = Gradient([next(gradients) * self.loss.ranks for _ in floats(each)])
            step.micro_batch(replace(batch, y=target, weight=torch.ones_like(batch.weight)), unused)


def _joined(targets: list[Gathered]) -> Gathered:
    given = [t.target for t in targets if t.target is not None]
    return Gathered(trees.concatenate(given) if given else None, torch.cat([t.valid for t in targets]))


@dataclass(eq=False)
class UpdateStep(WrappingStep):
    """Collects an update's micro-batches on the device, and runs them when the last one has arrived."""

    passes: Passes
    waiting: list[MicroBatch] = field(default_factory=list, kw_only=True)

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        self.waiting.append(batch)
        if batch.last:
            waiting, self.waiting = self.waiting, []
            self.passes(self.inner, waiting, loss_sum)

    def zero_grad(self) -> None:
        """Clear the gradients and the collected micro-batches: an update that ran out of memory is repeated."""
        self.waiting = []
        super().zero_grad()

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> Step:
        return replace(self, inner=self.inner.with_forward(forward), passes=self.passes.with_forward(forward), waiting=[])


@dataclass(eq=False)
class ClosureStep(UpdateStep):
    """Gives the optimizer a closure that runs the micro-batches, any number of times (LBFGS, SAM).

    Each call draws the same random numbers and returns the mean loss over all ranks; the first one is logged. Buffers
    (BatchNorm's statistics) change only in the first call: later calls may use weights that the model never has.
    """

    optimizer: torch.optim.Optimizer
    clip: Callable[[], bool | None]
    owners: Sequence[object]  # of the buffers
    parallel: Parallel
    log_sums: Callable[[], dict[str, torch.Tensor]]

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        self.waiting.append(batch)
        self._loss_sum = loss_sum

    def update(self) -> bool:
        state = streams.state()
        losses: list[torch.Tensor] = []

        def closure() -> torch.Tensor:
            if losses:
                streams.restore(state)
            self.inner.zero_grad()
            loss = torch.zeros_like(self._loss_sum)
            with buffers_kept(*(*self.owners, *self.log_sums().values()) if losses else ()):
                with torch.enable_grad():
                    self.passes(self.inner, self.waiting, loss)
                self.clip()
            losses.append(loss)
            return self.parallel.all_reduce_sum(loss.clone()) / self.parallel.data_world.size

        self.optimizer.step(closure)  # type: ignore[arg-type]
        self._loss_sum += losses[0]
        return True

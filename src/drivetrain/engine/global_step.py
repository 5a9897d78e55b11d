"""A step for losses that compare the samples of a whole batch, such as contrastive ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from drivetrain.core import streams, trees
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.step import Step
from drivetrain.engine.whole_update import WholeUpdateStep
from drivetrain.loss.embedding import ComparingLoss, Gathered, Gradient
from drivetrain.precision.base import Precision


@dataclass(eq=False)
class GlobalStep(WholeUpdateStep):
    """Computes the loss once an update, from the samples of all micro-batches and ranks: exactly that of one big batch.

    With one micro-batch that is one forward. With several, a first forward of each without gradients gives the embeddings, the
    loss gives their gradients, and a second forward of each goes on with these (GradCache, Gao et al. 2021). Both forwards
    draw the same random numbers, and buffers (BatchNorm's statistics) change in the second alone.
    """

    loss: ComparingLoss
    forward: Callable[..., Any]
    model: torch.nn.Module
    precision: Precision

    def run(self, batches: list[MicroBatch], loss_sum: torch.Tensor) -> None:
        targets: list[Any] = [self._target(batch) for batch in batches]
        if len(batches) == 1:
            weight = torch.ones_like(batches[0].weight)
            self.inner.micro_batch(replace(batches[0], y=targets[0], weight=weight), loss_sum)
        else:
            self._in_two_passes(batches, _joined(targets), loss_sum)

    def _target(self, batch: MicroBatch) -> Gathered:
        """The micro-batch's targets; none of its samples is valid where it only fills up (weight 0)."""
        return Gathered(batch.y if self.loss.views == 1 else None, (batch.weight > 0).repeat(trees.length(batch.x)))

    def _in_two_passes(self, batches: list[MicroBatch], gathered: Gathered, loss_sum: torch.Tensor) -> None:
        random_states, found = [], []
        with torch.no_grad(), self._buffers_kept(), self.precision.autocast():
            for batch in batches:
                random_states.append(streams.state())
                found.append(self.loss.embeddings(self.forward(self.loss.joined(batch.x))))
        embeddings = torch.cat(found).requires_grad_()
        loss = self.loss.over_ranks(embeddings, gathered)
        (gradient,) = torch.autograd.grad(loss, embeddings)
        loss_sum += loss.detach()
        ranks = self.loss.ranks
        unused = torch.zeros_like(loss_sum)
        parts: Any = gradient.split([len(f) for f in found])  # type: ignore[no-untyped-call]
        for batch, state, part in zip(batches, random_states, parts, strict=True):
            streams.restore(state)
            target: Any = Gradient(part * ranks)
            self.inner.micro_batch(replace(batch, y=target, weight=torch.ones_like(batch.weight)), unused)

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        yield
        for buffer, value in buffers:
            buffer.copy_(value)

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> Step:
        return replace(self, inner=self.inner.with_forward(forward), forward=forward, waiting=[])


def _joined(targets: list[Gathered]) -> Gathered:
    given = [t.target for t in targets if t.target is not None]
    return Gathered(torch.cat(given) if given else None, torch.cat([t.valid for t in targets]))

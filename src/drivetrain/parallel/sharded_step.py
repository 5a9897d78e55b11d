"""The training step of a rank that holds parts of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.step import WrappingStep
from drivetrain.parallel.whole_weights import WholeWeights


@dataclass(eq=False)
class ShardedStep(WrappingStep):
    """Gives the optimizer the gradients of this rank's shards, as plain tensors."""

    shards: Sequence[tuple[Any, torch.nn.Parameter]]  # each sharded weight, and its shard as the optimizer has it
    root: Any  # the model, if FSDP reduces gradients once an update; None: after every micro-batch
    whole: WholeWeights | None  # that the optimizer updates in place of the shards

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        if self.root is not None:
            self.root.set_requires_gradient_sync(batch.last)
        self.inner.micro_batch(batch, loss_sum)

    def update(self) -> bool:
        for p, shard in self.shards:
            shard.grad = None if p.grad is None else shard_of(p.grad).view(shard.shape)
        if self.whole is None:
            return self.inner.update()
        self.whole.gather()
        if made := self.inner.update():
            self.whole.spread()
        return made

    def zero_grad(self) -> None:
        for _, shard in self.shards:
            shard.grad = None
        if self.whole is not None:
            self.whole.clear()
        self.inner.zero_grad()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def shard_of(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself, sharing its memory."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor.detach()

"""Optimizers whose updates need norms of whole parameters, of which a rank may hold a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.device import sum_dtype
from drivetrain.optimizer.algorithms.flat_optimizer import Chunk, FlatOptimizer


class LayerwiseOptimizer(FlatOptimizer):
    """The base of optimizers that update a chunk in two halves: `measure` computes norms, and `move` updates by them.

    With `set_shards` the parameters are a rank's parts of others. All chunks are then measured before the first one moves, and
    the squares of all norms are added up over the ranks at once.
    """

    measures = 0  # norms of each parameter that `measure` returns

    def set_shards(
        self, sums: Callable[[Sequence[Tensor]], list[Tensor]], norm: Callable[[Sequence[Tensor], float], Tensor]
    ) -> None:
        """Take part of each parameter: `sums` adds up numbers over the ranks, `norm` is that of the whole model's gradients."""
        self._sums, self._norm, self.own_work = sums, norm, True

    def measure(self, chunk: Chunk, group: dict[str, object]) -> tuple[Tensor, ...]:
        """Begin the update. Returns `measures` tensors (n,), norms of the chunk's parameters; or nothing."""
        raise NotImplementedError

    def move(self, chunk: Chunk, group: dict[str, object], *norms: Tensor) -> None:
        """End the update, by the norms of whole parameters."""
        raise NotImplementedError

    def update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        self.move(chunk, group, *self.measure(chunk, group))

    def update_all(self, work: list[tuple[Chunk, dict[str, object]]]) -> None:
        if not self.own_work:
            super().update_all(work)
            return
        parameters = [p for group in self.param_groups for p in group["params"]]
        device = parameters[0].device
        place = {id(p): n for n, p in enumerate(parameters)}
        squares = torch.zeros(len(parameters), self.measures, device=device, dtype=sum_dtype(device))
        measured = []
        for chunk, group in work:
            chunk.step += 1
            norms = self.measure(chunk, group)
            if chunk.places is None:
                chunk.places = torch.tensor([place[id(p)] for p in chunk.params], device=device)
            if norms:
                squares[chunk.places] = torch.stack(norms, dim=1).to(squares.dtype).square()
            measured.append((chunk, group, bool(norms)))
        norms_of_all = torch.stack(self._sums(squares.unbind())).sqrt()
        for chunk, group, needed in measured:
            self.move(chunk, group, *(norms_of_all[chunk.places].to(chunk.dtype).unbind(1) if needed else ()))

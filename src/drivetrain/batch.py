"""How many samples make one update, and into which micro-batches they are split.

`global_batch` is the mathematics and stays; `steps` and the ranks only split it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge

from drivetrain import rng
from drivetrain.lazy import torch
from drivetrain.plan import Request, World
from drivetrain.spec import Count, Part, Run


class Batch(Part):
    """batch=fixed: every rank takes its share of the global batch in one forward."""

    steps = 1

    def __init__(
        self,
        global_batch: Count = 128,
        lr_scaling: Literal["none", "linear", "sqrt"] = "none",
        base_batch: Count = 256,
    ) -> None:
        self.global_batch, self.lr_scaling, self.base_batch = global_batch, lr_scaling, base_batch

    def check(self, run: Run) -> Iterator[str]:
        ranks = run.parallel.ranks()
        parts = self.steps * ranks
        if self.global_batch % parts:
            below, above = self.global_batch // parts * parts, math.ceil(self.global_batch / parts) * parts
            near = " or ".join(str(n) for n in (below, above) if n)
            yield (
                f"batch.global_batch={self.global_batch} does not divide into {self.steps} steps × {ranks} ranks: "
                f"set batch.global_batch to {near}"
            )

    def micro_batch(self, world: World) -> int:
        """Samples in one rank's forward."""
        return self.global_batch // (self.steps * world.size)

    def lr_factor(self) -> float:
        """What the learning rate is multiplied with (linear: Goyal et al. 2017; sqrt: Krizhevsky 2014)."""
        ratio = self.global_batch / self.base_batch
        return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]

    def updates_per_epoch(self, samples: int, drop_last: bool) -> int:
        """Updates that one epoch over `samples` makes."""
        return samples // self.global_batch if drop_last else math.ceil(samples / self.global_batch)

    def requests(
        self,
        samples: int,
        seed: int,
        epoch: int,
        world: World,
        drop_last: bool,
        skip: int = 0,
        device: torch.device | None = None,
    ) -> Iterator[Request]:
        """This rank's micro-batches of one epoch in order, from its update number `skip` on.

        Update u takes positions [u·G, (u+1)·G) of the epoch's permutation. A short tail is split as
        evenly as it goes, and each micro-batch weighs by its samples, so that its update is the mean over the tail.
        """
        order = rng.permutation(seed, epoch, samples)
        total = self.updates_per_epoch(samples, drop_last)
        size, steps = self.global_batch, self.steps
        full = samples // size
        even = torch.full((), 1.0 / steps, device=device)
        for update in range(skip, full):
            mine = order[update * size : (update + 1) * size].view(world.size, steps, -1)[world.rank].unbind(0)
            for step, indices in enumerate(mine, 1):
                yield Request(epoch, indices, even, step == steps, step == steps and update + 1 == total)
        if total > full and skip <= full:
            yield from self._tail(epoch, order[full * size :], world, device)

    def _tail(self, epoch: int, tail: torch.Tensor, world: World, device: torch.device | None) -> Iterator[Request]:
        mine = tail.tensor_split(world.size)[world.rank]
        chunks = mine.split(self.micro_batch(world)) if len(mine) else [tail[:1]]  # every rank joins the all-reduce
        for step, indices in enumerate(chunks, 1):
            share = len(indices) * world.size / len(tail) if len(mine) else 0.0
            last = step == len(chunks)
            yield Request(epoch, indices, torch.full((), share, device=device), last, last)


class Accumulate(Batch):
    """Gradients of `steps` micro-batches are summed before each update: the same mathematics in less memory."""

    def __init__(
        self,
        global_batch: Count = 128,
        steps: Annotated[int, Ge(1)] = 4,
        lr_scaling: Literal["none", "linear", "sqrt"] = "none",
        base_batch: Count = 256,
    ) -> None:
        super().__init__(global_batch, lr_scaling, base_batch)
        self.steps = steps

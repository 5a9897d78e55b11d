"""The states of metrics as torchmetrics knows them, on the run's device and over its ranks. It imports torchmetrics."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from torchmetrics.utilities.distributed import gather_all_tensors

from drivetrain.core import trees
from drivetrain.core.errors import UserError
from drivetrain.core.protocols import Strategy
from drivetrain.core.trees import Tree


def place(state: torchmetrics.Metric, device: torch.device, parallel: Strategy) -> torchmetrics.Metric:
    """Put a metric on a device, and let its `compute` be over the data-parallel ranks."""
    several = parallel.data_world.size > 1
    state.distributed_available_fn = lambda: several
    state.dist_sync_fn = gather
    state.process_group = parallel.data_group if several else None
    return state.to(device)


def gather(rows: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Return every rank's tensor. They may have different lengths. Raises UserError where they differ otherwise.

    torchmetrics gives an empty float32 vector for a rank without a batch, which torch cannot gather with the others' tensors.
    """
    layouts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(layouts, (tuple(rows.shape), rows.dtype), group=group)
    filled = [(shape, dtype) for shape, dtype in layouts if 0 not in shape]
    if len({shape[1:] for shape, _ in filled}) > 1:
        raise UserError(unlike_shapes("they differ in shape between ranks"))
    if filled and not rows.numel():
        shape, dtype = filled[0]
        rows = torch.empty((0, *shape[1:]), dtype=dtype, device=rows.device)
    gathered: list[torch.Tensor] = gather_all_tensors(rows, group)
    return gathered


def unlike_shapes(why: str) -> str:
    """Return why a function cannot be the metric, and what can."""
    return (
        f"metrics=[own]: a function gets the outputs and targets of all samples joined, and here {why}: name a "
        "torchmetrics.Metric class, which gets each batch, or set metrics.own.mean=true, if its value is a mean over samples"
    )


class Sums(torchmetrics.Metric):
    """Adds up tensors of one shape."""

    full_state_update = False

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> None:
        super().__init__()
        self.sums: torch.Tensor
        self.add_state("sums", torch.zeros(shape, dtype=dtype), dist_reduce_fx="sum")

    def update(self, sums: torch.Tensor) -> None:
        """Add a batch's sums."""
        self.sums += sums

    def compute(self) -> torch.Tensor:
        """Return the sums in double precision, on the CPU: whatever is computed from them are a few numbers."""
        return self.sums.cpu().double()


class Rows(torchmetrics.Metric):
    """Keeps rows of numbers (n, numbers)."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[torch.Tensor]
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, rows: torch.Tensor) -> None:
        """Keep some."""
        self.rows.append(rows)

    def compute(self) -> torch.Tensor:
        """Return all of them."""
        return torchmetrics.utilities.dim_zero_cat(self.rows)


class Collected(torchmetrics.Metric):
    """Keeps the outputs and targets of all samples, which may be trees."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.like: Tree = None  # empty tensors in the structure of a batch; None before the first one

    def update(self, output: Tree, target: Tree) -> None:
        """Keep a batch. Raises UserError where it cannot be joined with the others."""
        given = trees.leaves((output, target))
        if self.like is None:  # each rank has seen the run's example, also one without a batch
            self.like = trees.map_tensors(lambda t: torch.empty((0, *t.shape[1:]), dtype=t.dtype), (output, target))
            for number in range(len(given)):
                self.add_state(f"part_{number}", [], dist_reduce_fx="cat")
        if [t.shape[1:] for t in given] != [t.shape[1:] for t in trees.leaves(self.like)]:
            raise UserError(unlike_shapes("they differ in shape from batch to batch"))
        for kept, tensor in zip(self._parts(), given, strict=True):
            kept.append(tensor)

    def compute(self) -> Tree:
        """Return the outputs and the targets of all samples."""
        return trees.unflatten([torchmetrics.utilities.dim_zero_cat(kept) for kept in self._parts()], self.like)

    def _parts(self) -> list[Any]:
        return [getattr(self, f"part_{number}") for number in range(len(trees.leaves(self.like)))]

"""The states of metrics: accumulated values on the run's device, joined over the ranks. Needs no torchmetrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.core.errors import UserError
from drivetrain.core.options import groups
from drivetrain.core.step import trees
from drivetrain.core.step.trees import Tree
from drivetrain.core.typed import StateDict


def place(state: Any, device: torch.device, parallel: groups.Parallel) -> Any:
    """Put a State or a torchmetrics.Metric on a device, and let its `compute` join the data-parallel ranks."""
    several = parallel.data_world.size > 1
    state.distributed_available_fn = lambda: several
    state.dist_sync_fn = gather
    state.process_group = parallel.data_group if several else None
    return state.to(device)


def gather(rows: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return every rank's tensor. They may differ in length. Raises UserError for other differences.

    A rank without a batch does not have the others' shape: torchmetrics' lists become an empty float32 vector.
    """
    layouts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(layouts, (tuple(rows.shape), rows.dtype), group=group)
    filled = [(shape, dtype) for shape, dtype in layouts if 0 not in shape] or layouts
    if len({shape[1:] for shape, _ in filled}) > 1:
        raise UserError(unlike_shapes("they differ in shape between ranks"))
    shape, dtype = max(filled, key=lambda layout: layout[0][:1])
    sent = rows
    if tuple(rows.shape) != shape or rows.dtype != dtype:
        sent = torch.zeros(shape, dtype=dtype, device=rows.device)
        if rows.numel():
            sent[: len(rows)] = rows
    gathered = [torch.empty_like(sent) for _ in layouts]
    dist.all_gather(gathered, sent.contiguous(), group=group)
    return [each[: of[0]] if of else each for each, (of, _) in zip(gathered, layouts, strict=True)]


def unlike_shapes(why: str) -> str:
    """Return why a function cannot be the metric, and the alternative."""
    return (
        f"metrics=[own]: a function gets the outputs and targets of all samples joined, and here {why}: name a "
        "torchmetrics.Metric class, which gets each batch, or set metrics.own.mean=true, if its value is a mean over samples"
    )


class State:
    """The state of a metric over one evaluation's batches. It has the methods of a torchmetrics.Metric that metrics call."""

    process_group: dist.ProcessGroup | None = None  # group of the joined ranks; None: all
    distributed_available_fn: Callable[[], bool] = staticmethod(lambda: False)  # True if there are several

    def to(self, device: torch.device) -> State:
        """Keep it on this device."""
        self.device = device
        self.reset()
        return self

    def reset(self) -> None:
        """Forget the batches so far."""
        raise NotImplementedError

    def state_dict(self) -> StateDict:
        """Return nothing: an evaluation is over before the run is saved."""
        return {}


class Sums(State):
    """Adds up tensors of one shape: the given one, or the first tensor's."""

    def __init__(self, shape: tuple[int, ...] | None = None, dtype: torch.dtype = torch.int64) -> None:
        self.shape, self.dtype = shape, dtype

    def reset(self) -> None:
        made = None if self.shape is None else torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        self.sums: torch.Tensor | None = made

    def update(self, sums: torch.Tensor) -> None:
        """Add a batch's sums."""
        if self.sums is None:  # each rank has seen the run's example, also one without a batch
            self.shape, self.dtype = tuple(sums.shape), sums.dtype
            self.reset()
        assert self.sums is not None
        self.sums += sums

    def compute(self) -> torch.Tensor:
        """Return the sums in double precision, on the CPU, because results are only a few numbers."""
        assert self.sums is not None
        sums = self.sums.clone()
        if self.distributed_available_fn():
            dist.all_reduce(sums, group=self.process_group)
        return sums.cpu().double()


class Collected(State):
    """Keeps the outputs and targets of all samples, which may be trees."""

    like: Tree = None  # empty tensors in the structure of a batch; None before the first one

    def reset(self) -> None:
        self._parts: list[list[torch.Tensor]] = [[] for _ in trees.leaves(self.like)]

    def update(self, output: Tree, target: Tree) -> None:
        """Keep a batch. Raises UserError if it cannot be joined with the others."""
        given = trees.leaves((output, target))
        if self.like is None:  # each rank has seen the run's example, also one without a batch
            self.like = trees.map_tensors(lambda t: t[:0].clone(), (output, target))
            self.reset()
        if [t.shape[1:] for t in given] != [t.shape[1:] for t in trees.leaves(self.like)]:
            raise UserError(unlike_shapes("they differ in shape from batch to batch"))
        for kept, tensor in zip(self._parts, given, strict=True):
            kept.append(tensor)

    def compute(self) -> Tree:
        """Return the outputs and the targets of all samples."""
        own = [torch.cat([none, *kept]) for none, kept in zip(trees.leaves(self.like), self._parts, strict=True)]
        if self.distributed_available_fn():
            own = [torch.cat(gather(rows, self.process_group)) for rows in own]
        return trees.unflatten(own, self.like)

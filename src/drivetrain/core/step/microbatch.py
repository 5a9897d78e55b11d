"""Micro-batches: requested from a loader, and delivered on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from drivetrain.core.lazy import torch
from drivetrain.core.step.trees import Tree


@dataclass(slots=True)
class Request:
    """The indices of one micro-batch that the loader is to fetch. It travels to worker processes: its tensors are on the CPU."""

    epoch: int
    indices: torch.Tensor  # (n,) int64
    weight: float  # the micro-batch's share of the update's samples, times the ranks (which average); 1 in evaluation
    last: bool = True  # the update's last micro-batch
    epoch_end: bool = False  # the epoch's last micro-batch
    mix_with: torch.Tensor | None = None  # (n,) the sample that each one is mixed with (mixup, CutMix)
    update: int = 0  # of the epoch, from 0
    again: bool = False  # whether samples come several times in an epoch: indices are then their numbers (core/order.py)
    # Set by the loader once the batch has been read:
    seconds: float | None = None  # spent reading, decoding and augmenting
    ready: float = 0.0  # time.perf_counter() when that was done; all processes share this clock

    def indices_to_read(self) -> torch.Tensor:
        """Return the samples to read: `indices`, then those of `mix_with` that are not among them."""
        if self.mix_with is None:
            return self.indices
        return torch.cat([self.indices, self.mix_with[~torch.isin(self.mix_with, self.indices)]])

    def __reduce__(self) -> tuple[Callable[..., Request], tuple[object, ...]]:
        """Pickle tensors as arrays. torch's queues would have the reader fetch each by a connection.

        Where the reader is killed then, the thread at its other end prints a traceback.
        """
        values = (getattr(self, field.name) for field in fields(self))
        return _unpickled, tuple(value.numpy() if isinstance(value, torch.Tensor) else value for value in values)


def _unpickled(*values: object) -> Request:
    given: list[Any] = [torch.from_numpy(value) if type(value).__name__ == "ndarray" else value for value in values]
    return Request(*given)


@dataclass(frozen=True, eq=False)
class Piece:
    """Inputs and targets of many micro-batches in their order, which are on the device together."""

    x: Tree
    y: Tree


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch on the device."""

    x: Tree  # what the model gets
    y: Tree  # what the loss compares its output with
    weight: torch.Tensor  # 0-d, as in its request
    last: bool
    epoch_end: bool
    seconds: float | None = None  # as in its request
    ready: float = 0.0
    filler: bool = False  # in an evaluation: it only lets this rank take part, and its samples count on another one
    shares: torch.Tensor | None = None  # (losses,) of a sum of several losses: its share of the update's items of each
    piece: Piece | None = None  # that its inputs and targets are a view of
    row: int = 0  # the place of its first sample there
    more: bool = False  # the next micro-batch is there too: nothing is to be waited for


Item = TypeVar("Item", Request, MicroBatch)


def one_update(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the next update's items of a longer stream. When it ends, the loop has made that update: it asks for more."""
    for item in items:
        yield item
        if item.last:
            return

"""Micro-batches: requested from a loader, and delivered on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from drivetrain.core.lazy import torch
from drivetrain.core.step.trees import Tree


@dataclass(slots=True)
class Request:
    """The indices of one micro-batch for the loader to fetch. It is sent to worker processes, so its tensors are on the CPU."""

    epoch: int
    indices: torch.Tensor  # (n,) int64
    weight: float  # the micro-batch's share of the update's samples, times the ranks (which average); 1 in evaluation
    last: bool = True  # the update's last micro-batch
    epoch_end: bool = False  # the epoch's last micro-batch
    mix_with: torch.Tensor | None = None  # (n,) each sample's partner (mixup, CutMix)
    update: int = 0  # of the epoch, from 0
    again: bool = False  # whether samples repeat in an epoch: indices are then numbers of the order (core/order.py)
    # Set by the loader once the batch has been read:
    seconds: float | None = None  # spent reading, decoding and augmenting
    ready: float = 0.0  # its end by time.perf_counter(); all processes share this clock

    def indices_to_read(self) -> torch.Tensor:
        """Return the samples to read: `indices`, then those of `mix_with` that are not among them."""
        if self.mix_with is None:
            return self.indices
        return torch.cat([self.indices, self.mix_with[~torch.isin(self.mix_with, self.indices)]])

    def __reduce__(self) -> tuple[Callable[..., Request], tuple[object, ...]]:
        """Pickle tensors as arrays.

        torch's queues would make the reader fetch each tensor over a connection. If the reader is killed, the thread at the
        other end prints a traceback.
        """
        values = (getattr(self, field.name) for field in fields(self))
        return _unpickled, tuple(value.numpy() if isinstance(value, torch.Tensor) else value for value in values)


def _unpickled(*values: object) -> Request:
    given: list[Any] = [torch.from_numpy(value) if type(value).__name__ == "ndarray" else value for value in values]
    return Request(*given)


@dataclass(frozen=True, eq=False)
class Piece:
    """Inputs and targets of many micro-batches in their order, together on the device."""

    x: Tree
    y: Tree


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch on the device."""

    x: Tree  # the model's inputs
    y: Tree  # the loss's targets
    weight: torch.Tensor  # 0-d, as in its request
    last: bool
    epoch_end: bool
    seconds: float | None = None  # as in its request
    ready: float = 0.0
    filler: bool = False  # of an evaluation: lets this rank take part; its samples count on another rank
    shares: torch.Tensor | None = None  # (losses,) for a sum of losses: its share of the update's items in each
    piece: Piece | None = None  # its inputs and targets are views of this piece
    row: int = 0  # its first sample's row in the piece
    more: bool = False  # the next micro-batch is ready too, without a wait


Item = TypeVar("Item", Request, MicroBatch)


def one_update(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the next update's items of a longer stream. At its end the loop asks for more, so that update is made."""
    for item in items:
        yield item
        if item.last:
            return

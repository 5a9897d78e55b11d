"""Micro-batches: requested from a loader, and delivered on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from drivetrain.core.lazy import torch


@dataclass(slots=True)
class Request:
    """One micro-batch still to be fetched."""

    epoch: int
    indices: torch.Tensor  # (n,) int64
    weight: torch.Tensor  # 0-d; 1 in evaluation
    last: bool = True  # the update's last micro-batch
    epoch_end: bool = False  # the epoch's last micro-batch
    partners: torch.Tensor | None = None  # (n,) samples to mix with, where an augmentation mixes
    # Known once it has been read, by a reader that can tell:
    seconds: float | None = None  # of reading, decoding and augmenting
    ready: float = 0.0  # time.perf_counter() when that was done, which all processes share

    def rows(self) -> torch.Tensor:
        """The samples to read: `indices`, then those partners that are not among them."""
        if self.partners is None:
            return self.indices
        return torch.cat([self.indices, self.partners[~torch.isin(self.partners, self.indices)]])


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch on the device. `weight` is its share of the update's samples, times the ranks (which average)."""

    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor
    last: bool
    epoch_end: bool
    seconds: float | None = None  # as in its request
    ready: float = 0.0


Item = TypeVar("Item", Request, MicroBatch)


def one_update(parts: Iterator[Item]) -> Iterator[Item]:
    """The next update's parts of a longer stream. When it ends, that update is made: the loop has come for more."""
    for part in parts:
        yield part
        if part.last:
            return

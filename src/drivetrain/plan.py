"""Which samples make which micro-batch of which update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from drivetrain.lazy import torch


class World(NamedTuple):
    """This process among the ranks of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


@dataclass(slots=True)
class Request:
    """One micro-batch still to be fetched."""

    epoch: int
    indices: torch.Tensor  # (n,) int64
    weight: torch.Tensor  # 0-d; 1 in evaluation
    last: bool = True  # the update's last micro-batch
    epoch_end: bool = False  # the epoch's last micro-batch


@dataclass(slots=True)
class Micro:
    """One micro-batch on the device. `weight` is its share of the update's samples, times the ranks (which average)."""

    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor
    last: bool
    epoch_end: bool


Part = TypeVar("Part", Request, Micro)


def one_update(parts: Iterator[Part]) -> Iterator[Part]:
    """The next update's parts of a longer stream. When it ends, that update is made: the loop has come for more."""
    for part in parts:
        yield part
        if part.last:
            return

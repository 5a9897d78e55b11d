"""A tensor as ranks hold it: the parts that this rank has, each with its place in the whole."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from drivetrain.core.lazy import torch


class Part(NamedTuple):
    """A part of a tensor, and the index in the whole one at which it begins, by dimension."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


class Divided(NamedTuple):
    """A tensor of this shape, and this rank's parts of it. Several ranks may hold one part; no two parts overlap."""

    shape: tuple[int, ...]
    parts: list[Part]


class Shards(Protocol):
    """What a rank holds of the tensors of a checkpoint: of kind "model", "optimizer", "ema" or "masters", each of a weight."""

    def divided(self, kind: str, name: str, tensor: torch.Tensor) -> Divided:
        """Return a tensor that belongs to the weight `name` as this rank's parts of it, in the weight's own shape."""

    def empty_shard(self, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor for this rank's parts of one of this shape. A meta tensor: it has none of it."""


class Undivided:
    """A process that holds all tensors whole."""

    def divided(self, kind: str, name: str, tensor: torch.Tensor) -> Divided:
        """Return the tensor as its only part."""
        return whole(tensor)

    def empty_shard(self, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor of the whole shape."""
        return torch.empty(shape, dtype=dtype)


def whole(tensor: torch.Tensor) -> Divided:
    """Return a tensor as its only part. A meta tensor has none: it is on other ranks."""
    return Divided(tuple(tensor.shape), [] if tensor.is_meta else [Part((0,) * tensor.ndim, tensor)])

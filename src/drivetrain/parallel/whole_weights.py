"""Whole weights for optimizers that need them: each weight that is divided over ranks is updated by one of these."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.core.lazy import torch


@dataclass
class _Weight:
    """A divided weight, the part of it that this rank holds, and the whole one as the optimizer has it."""

    name: str
    shard: torch.nn.Parameter
    shape: tuple[int, ...]
    ranks: tuple[str, ...]  # dimensions of the mesh over which it is divided
    owner: tuple[int, ...]  # the coordinates in them of the rank that updates it
    own: bool = False
    whole: Any = None  # without memory on the other ranks


class WholeWeights:
    """Hands every divided weight to one of the ranks that hold a part of it, as evenly as their sizes allow.

    Before an update these ranks gather its gradient; its owner updates the whole weight, with an optimizer state that no other
    rank has, and gives every rank its part. The owner keeps the whole weight, the others a tensor without memory in its place.
    """

    def __init__(
        self,
        divided: Sequence[tuple[str, torch.nn.Parameter, tuple[int, ...], tuple[str, ...]]],
        mesh: Any,
        gather: Callable[[str, torch.Tensor], torch.Tensor],
        own_part: Callable[[str, torch.Tensor], torch.Tensor],
    ) -> None:
        self._mesh, self._gather, self._own_part = mesh, gather, own_part
        self._at = {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names}
        self._weights = [_Weight(name, shard, shape, ranks, ()) for name, shard, shape, ranks in divided]
        self._share_out()
        self.stale = True  # the owners have old weights: something else, such as a loaded checkpoint, has set the parts
        for weight in self._weights:
            weight.own = weight.owner == tuple(self._at[name] for name in weight.ranks)
            like: dict[str, Any] = {"dtype": weight.shard.dtype, "device": weight.shard.device if weight.own else "meta"}
            weight.whole = torch.nn.Parameter(torch.empty(weight.shape, **like))
        self.by_shard = {id(weight.shard): weight.whole for weight in self._weights}
        self.owned = {weight.name: weight.own for weight in self._weights}

    def _share_out(self) -> None:
        """Choose the owners: the largest weights first, each to the rank that has the least so far."""
        loads: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {}
        for weight in sorted(self._weights, key=lambda w: (-math.prod(w.shape), w.name)):
            sizes = [range(self._mesh[name].size()) for name in weight.ranks]
            load = loads.setdefault(weight.ranks, dict.fromkeys(itertools.product(*sizes), 0))
            weight.owner = min(load, key=lambda rank: (load[rank], rank))
            load[weight.owner] += math.prod(weight.shape)

    def gather(self) -> None:
        """Give the owners whole gradients, and whole weights too where anything but `spread` has set the parts."""
        for weight in self._weights:
            if self.stale:
                whole = self._gather(weight.name, weight.shard)
                if weight.own:
                    weight.whole.detach().copy_(whole)
            if weight.shard.grad is not None:
                gradient = self._gather(weight.name, weight.shard.grad)
                weight.whole.grad = gradient.contiguous() if weight.own else None
        self.stale = False

    def spread(self) -> None:
        """Give every rank its parts of the updated weights."""
        for weight in self._weights:
            if weight.shard.grad is not None:
                whole = weight.whole.detach() if weight.own else torch.empty(weight.shape, **_kind(weight.shard))
                self._broadcast(whole, weight)
                weight.shard.detach().copy_(self._own_part(weight.name, whole))

    def _broadcast(self, whole: torch.Tensor, weight: _Weight) -> None:
        """Send the owner's weight along one dimension of the mesh after the other, from the ranks that have it already."""
        import torch.distributed as dist

        for n, name in enumerate(weight.ranks):
            if all(self._at[later] == at for later, at in zip(weight.ranks[n + 1 :], weight.owner[n + 1 :], strict=True)):
                group = self._mesh.get_group(name)
                dist.broadcast(whole, dist.get_global_rank(group, weight.owner[n]), group=group)

    def clear(self) -> None:
        """Forget the whole gradients."""
        for weight in self._weights:
            weight.whole.grad = None


def _kind(tensor: torch.Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}

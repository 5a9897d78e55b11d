"""Sums over the ranks that hold the parts of weights: for norms of whole layers and of their rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from drivetrain.core.lazy import torch
from drivetrain.parallel.reducing_step import shard_of
from drivetrain.saving.content import Part


class Layout(NamedTuple):
    """The mesh dimensions over which a weight is divided."""

    run: tuple[str, ...]  # a sum over these counts each weight of the run once
    layer: tuple[str, ...]  # the parts of this weight
    row: tuple[str, ...]  # the parts of its rows; of a vector, which is one unit, its elements


def total_over_parts(
    powers: Mapping[tuple[str, ...], torch.Tensor], dims: Sequence[tuple[str, ...]], mesh: Any, device: torch.device
) -> torch.Tensor:
    """Return the sum over all weights, 0-d, of this rank's `powers` by the dimensions over which its weights are divided.

    `dims` are those of any rank's weights, in the same order on all ranks.
    """
    import torch.distributed as dist

    total = torch.zeros((), device=device, dtype=torch.float64)
    for dimensions in dims:
        power = torch.zeros_like(total) + powers.get(dimensions, 0.0)  # a rank may have no weights with these dimensions
        for name in dimensions:
            dist.all_reduce(power, group=mesh.get_group(name))
        total = total + power
    return total


class ShardSums:
    """Adds up numbers of weights over the ranks that hold their parts. Weights of one layout share an all-reduce."""

    def __init__(self, layouts: Sequence[tuple[str, ...]], mesh: Any) -> None:
        self._mesh, self._members = mesh, defaultdict(list)
        for i, dimensions in enumerate(layouts):
            if dimensions:
                self._members[dimensions].append(i)

    def __call__(self, numbers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sums of a tensor for each weight. A weight's has the same shape on all ranks that hold a part."""
        import torch.distributed as dist

        sums = list(numbers)
        for dimensions in sorted(self._members):
            members = self._members[dimensions]
            flat = torch.cat([numbers[i].reshape(-1) for i in members])
            for name in dimensions:
                dist.all_reduce(flat, group=self._mesh.get_group(name))
            for i, part in zip(members, flat.split([numbers[i].numel() for i in members]), strict=True):
                sums[i] = part.view(numbers[i].shape)
        return sums


def layout_of(p: Any, ndim: int, sharded: bool) -> Layout:
    """Return the layout of a weight of `ndim` dimensions; `sharded` says whether it is a DTensor."""
    if not sharded:
        return Layout((), (), ())
    rows = 1 + p.ndim - ndim  # a fused projection has a dimension more, for its parts
    divided = [(n, how) for n, how in zip(p.device_mesh.mesh_dim_names, p.placements, strict=True) if not how.is_replicate()]
    layer = tuple(name for name, _ in divided)
    return Layout(layer, layer, tuple(name for name, how in divided if ndim <= 1 or how.dim >= rows))


def parts_of(tensor: Any, shape: tuple[int, ...]) -> list[Part]:
    """Return this rank's parts of a DTensor, as views, in the weight of this shape; none where its part has no elements.

    The DTensor of a fused projection has a dimension more than its weight, for its matrices, and a part of each is here.
    """
    (chunk,) = tensor.__create_chunk_list__()
    local, offsets = shard_of(tensor), tuple(chunk.offsets)
    if not local.numel() and 0 not in shape:
        return []
    if tensor.ndim == len(shape):
        return [Part(offsets, local)]
    first, row, *rest = offsets
    return [Part(((first + i) * tensor.shape[1] + row, *rest), matrix) for i, matrix in enumerate(local)]

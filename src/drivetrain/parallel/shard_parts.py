"""This rank's parts of a DTensor, as places in the weight that it stands for."""

from __future__ import annotations

from typing import Any

from drivetrain.parallel.sharded_step import shard_of
from drivetrain.saving.divided import Part


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

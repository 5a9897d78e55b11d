"""Pieces of an epoch: several micro-batches of on-device samples are fetched and augmented together.

Batches of small images are bound by launches. Each micro-batch is a view of its piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from drivetrain.core.lazy import torch
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import MicroBatch, Piece, Request
from drivetrain.core.step.source import Source
from drivetrain.core.step.tensors import Tensors, has_streams
from drivetrain.core.step.trees import Tree

PIECE = 2**28  # bytes of float32 inputs augmented and normalised at once: an epoch of small images


def samples_at_once(source: Source, views: int, device: torch.device) -> int:
    """Return the number of samples prepared at once; 0: each micro-batch separately. A CPU launches nothing."""
    if not isinstance(source, Tensors) or source.device.type != device.type or not has_streams(device):
        return 0
    return PIECE // max(1, 4 * views * source.values())


def pieces(requests: Iterable[Request], most: int) -> Iterator[list[Request]]:
    """Yield successive requests of one epoch in groups of up to `most` samples. A request that mixes samples stays alone."""
    piece: list[Request] = []
    room = most
    for request in requests:
        room -= len(request.indices)
        if piece and (room < 0 or request.mix_with is not None or request.epoch != piece[0].epoch):
            yield piece
            piece, room = [], most - len(request.indices)
        piece.append(request)
        if request.mix_with is not None:
            room = 0
    if piece:
        yield piece


def joined(piece: list[Request]) -> Request:
    """Return one request for the samples of several."""
    if len(piece) == 1:
        return piece[0]
    return replace(piece[0], indices=torch.cat([request.indices for request in piece]), weight=1.0)


def divided(whole: MicroBatch, requests: list[Request], weights: dict[float, torch.Tensor]) -> Iterator[MicroBatch]:
    """Yield the micro-batches of these requests as views of `whole`, their samples in order. `weights` caches weights."""
    if len(requests) == 1:
        yield whole
        return
    sizes = [len(request.indices) for request in requests]
    x, y = (_split(tree, sizes) for tree in (whole.x, whole.y))
    seconds, row, piece = (whole.seconds or 0.0) / len(requests), 0, Piece(whole.x, whole.y)
    for number, each in enumerate(requests):
        if each.weight not in weights:
            weights[each.weight] = torch.full((), each.weight, device=whole.weight.device)
        yield MicroBatch(
            x[number], y[number], weights[each.weight], each.last, each.epoch_end, seconds, whole.ready, not each.weight,
            piece=piece, row=row, more=number + 1 < len(requests),
        )  # fmt: skip
        row += sizes[number]


def _split(tree: Tree, sizes: list[int]) -> list[Tree]:
    """Return views of the samples of a tree, the first sizes[0] of them and so on."""
    parts = zip(*(tensor.split(sizes) for tensor in trees.leaves(tree)), strict=True)
    return [trees.unflatten(part, tree) for part in parts]

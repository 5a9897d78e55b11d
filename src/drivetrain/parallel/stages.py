"""Runs one stage of a pipeline: a part of a model's forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.core.torch_patches import wrap_forward


class StagedForward:
    """Runs a model's forward with one stage's blocks only. Created last, so that its hooks enclose the blocks' other hooks."""

    def __init__(self, model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
        self._model, self._count = model, len(blocks)
        self._first, self._end, self._received = 0, len(blocks), None
        self._undo = ExitStack()
        for i, block in enumerate(blocks):
            self._undo.callback(block.register_forward_pre_hook(functools.partial(self._enter, i), prepend=True).remove)
            self._undo.callback(wrap_forward(block, functools.partial(self._skip_before_stage, i)))
            self._undo.callback(block.register_forward_hook(functools.partial(self._leave, i)).remove)

    def run(self, first: int, end: int, h: Any, x: Any) -> Any:
        """Run blocks first to end - 1 on `h`, the previous block's output for the input `x`. Returns their output.

        With the last block it returns the model's output.
        """
        self._first, self._end, self._received = first, end, h
        try:
            return self._model(x)
        except _StageEndError as stage_end:
            return stage_end.h
        finally:
            self._received = None

    def remove(self) -> None:
        """Restore the blocks."""
        self._undo.close()

    def _enter(self, i: int, block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._received, *args[1:]) if i == self._first and i > 0 else args

    def _skip_before_stage(self, i: int, forward: Any) -> Any:
        return lambda h, *args, **kwargs: h if i < self._first else forward(h, *args, **kwargs)

    def _leave(self, i: int, block: Any, args: tuple[Any, ...], out: Any) -> None:
        if i + 1 == self._end and self._end < self._count:
            raise _StageEndError(out)


class _StageEndError(Exception):
    """Ends a forward after the stage's last block, and carries its output."""

    def __init__(self, h: Any) -> None:
        super().__init__()
        self.h = h


class Stage(torch.nn.Module):
    """Wraps a stage as torch's pipelining calls it: with its input and the number of the micro-batch."""

    def __init__(self, forward: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, h: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self._forward(h, int(number))


def schedule(name: str, own_stages: Sequence[Any], count: int, micro_batches: int, loss: Callable[..., torch.Tensor]) -> Any:
    """Return torch's schedule `name` for this rank's stages, out of `count`, and an update's micro-batches."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    if name == "interleaved":
        return ScheduleInterleaved1F1B(list(own_stages), micro_batches, loss_fn=loss, scale_grads=False)
    # 1F1B needs at least as many micro-batches as stages; with fewer, all forwards come first.
    kind = Schedule1F1B if name == "1f1b" and micro_batches >= count else ScheduleGPipe
    return kind(own_stages[0], micro_batches, loss_fn=loss, scale_grads=False)


def send(h: torch.Tensor, rank: int, control: Any) -> None:
    """Send a tensor of any shape to another rank; its shape is sent over the group `control`."""
    dist.send_object_list([(tuple(h.shape), h.dtype)], rank, group=control)
    dist.send(h.contiguous(), rank)


def receive(rank: int, control: Any, device: torch.device) -> torch.Tensor:
    """Receive the tensor that another rank sends."""
    header: list[Any] = [None]
    dist.recv_object_list(header, rank, group=control)
    h = torch.empty(header[0][0], dtype=header[0][1], device=device)
    dist.recv(h, rank)
    return h


def broadcast(h: torch.Tensor, source: int, group: Any) -> torch.Tensor:
    """Broadcast the tensor of rank `source` to the group. The other ranks' tensors may have other shapes."""
    shapes: list[Any] = [None] * dist.get_world_size(group)
    is_source = dist.get_rank() == source
    dist.all_gather_object(shapes, (tuple(h.shape), h.dtype) if is_source else None, group=group)
    shape, dtype = next(header for header in shapes if header is not None)
    full = h.contiguous() if is_source else torch.empty(shape, dtype=dtype, device=h.device)
    dist.broadcast(full, source, group=group)
    return full


def split_names(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], owned: Sequence[int]) -> tuple[set[str], set[str]]:
    """Return the names of weights and buffers in the owned blocks, and the names of those outside of all blocks."""
    block_of = {id(t): i for i, block in enumerate(blocks) for t in (*block.parameters(), *block.buffers())}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    own = {name for name, t in named if block_of.get(id(t)) in owned}
    return own, {name for name, t in named if id(t) not in block_of}

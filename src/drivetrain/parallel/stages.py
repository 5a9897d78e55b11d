"""The part of a model's forward that is one stage of a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist


class Row:
    """A model's forward, of which one stage's blocks alone are run. Made last: its hooks stand around those of the blocks."""

    def __init__(self, model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
        self._model, self._count = model, len(blocks)
        self._first, self._end, self._received = 0, len(blocks), None
        self._undo = ExitStack()
        for i, block in enumerate(blocks):
            self._undo.callback(block.register_forward_pre_hook(functools.partial(self._enter, i), prepend=True).remove)
            self._undo.callback(back(block))
            block.forward = self._passing(i, block.forward)  # type: ignore[method-assign]
            self._undo.callback(block.register_forward_hook(functools.partial(self._leave, i)).remove)

    def run(self, first: int, end: int, h: Any, x: Any) -> Any:
        """Blocks first to end - 1 on `h`, which the block before gave for the input `x`; with the last block, the output."""
        self._first, self._end, self._received = first, end, h
        try:
            return self._model(x)
        except _LeaveError as left:
            return left.h
        finally:
            self._received = None

    def remove(self) -> None:
        """Leave the blocks as they were."""
        self._undo.close()

    def _enter(self, i: int, block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._received, *args[1:]) if i == self._first and i > 0 else args

    def _passing(self, i: int, forward: Any) -> Any:
        return lambda h, *args, **kwargs: h if i < self._first else forward(h, *args, **kwargs)

    def _leave(self, i: int, block: Any, args: tuple[Any, ...], out: Any) -> None:
        if i + 1 == self._end and self._end < self._count:
            raise _LeaveError(out)


def back(block: torch.nn.Module) -> Callable[[], None]:
    """What gives a module back the forward that it has now, its class's or one of its own."""
    if "forward" in vars(block):
        return functools.partial(setattr, block, "forward", block.forward)
    return functools.partial(delattr, block, "forward")


class _LeaveError(Exception):
    """The way out of a forward, with what the stage's last block gave."""

    def __init__(self, h: Any) -> None:
        super().__init__()
        self.h = h


class Stage(torch.nn.Module):
    """One stage as torch's pipelining calls it: its input, and the number of the micro-batch."""

    def __init__(self, forward: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, h: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self._forward(h, int(number))


def schedule(name: str, mine: Sequence[Any], stages: int, micros: int, loss: Callable[..., torch.Tensor]) -> Any:
    """torch's schedule of that name for this rank's stages, out of so many, and an update's micro-batches."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    if name == "interleaved":
        return ScheduleInterleaved1F1B(list(mine), micros, loss_fn=loss, scale_grads=False)
    # One forward, one backward wants as many micro-batches as stages; fewer all go forward first.
    kind = Schedule1F1B if name == "1f1b" and micros >= stages else ScheduleGPipe
    return kind(mine[0], micros, loss_fn=loss, scale_grads=False)


def send(h: torch.Tensor, rank: int, control: Any) -> None:
    """A tensor of any shape to another rank; its shape goes by the group `control`."""
    dist.send_object_list([(tuple(h.shape), h.dtype)], rank, group=control)
    dist.send(h.contiguous(), rank)


def receive(rank: int, control: Any, device: torch.device) -> torch.Tensor:
    """What the other rank sends."""
    told: list[Any] = [None]
    dist.recv_object_list(told, rank, group=control)
    h = torch.empty(told[0][0], dtype=told[0][1], device=device)
    dist.recv(h, rank)
    return h


def broadcast(h: torch.Tensor, source: int, group: Any) -> torch.Tensor:
    """The tensor of rank `source`, on every rank of the group; theirs may have other shapes."""
    shapes: list[Any] = [None] * dist.get_world_size(group)
    here = dist.get_rank() == source
    dist.all_gather_object(shapes, (tuple(h.shape), h.dtype) if here else None, group=group)
    shape, dtype = next(told for told in shapes if told is not None)
    whole = h.contiguous() if here else torch.empty(shape, dtype=dtype, device=h.device)
    dist.broadcast(whole, source, group=group)
    return whole


def names(model: torch.nn.Module, row: Sequence[torch.nn.Module], owned: Sequence[int]) -> tuple[set[str], set[str]]:
    """The names of weights and buffers in the owned blocks, and of those outside of all blocks."""
    inside = {id(t): i for i, block in enumerate(row) for t in (*block.parameters(), *block.buffers())}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    own = {name for name, t in named if inside.get(id(t)) in owned}
    return own, {name for name, t in named if id(t) not in inside}

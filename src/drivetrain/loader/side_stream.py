"""Copies batches to a device on a stream of their own, while the main stream runs the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from drivetrain.core import trees
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch, Request
from drivetrain.core.trees import Tree

IN_FLIGHT = 8  # copies that may be queued: each holds a batch in pinned memory until the device gets there


@cache
def side_stream(device: torch.device) -> Any:
    """Return the stream that all loaders of this process copy on: the allocator keeps freed memory for each stream apart."""
    return torch.get_device_module(device).Stream(device)


def copy_ahead(
    batches: Iterable[tuple[Tree, Tree, Request]],
    to_device: Callable[[Tree, Tree, Request], MicroBatch],
    device: torch.device,
    ahead: int,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches that `to_device` makes of `batches`, each of which was started `ahead` batches before.

    A micro-batch's memory belongs to the side stream, and the main stream reads it. Each start first waits for all that the
    main stream has been given, so memory that the loop has dropped is free by then. `record_stream` would do too, but then
    dropped memory stays taken until the device gets there: a host that is many steps ahead would fill the device. For the
    same reason it may only be IN_FLIGHT copies ahead: it waits for an older one, which is done unless the device has that
    many steps to do.
    """
    module, side = torch.get_device_module(device), side_stream(device)
    started: deque[tuple[MicroBatch, Any]] = deque()
    copies: deque[Any] = deque()  # the events of those that may be under way
    for batch in batches:
        main = module.current_stream(device)
        if trees.first(batch[0]).device.type == "cpu":
            if len(copies) == ahead + IN_FLIGHT:
                copies.popleft().synchronize()
            side.wait_stream(main)
            with module.stream(side):
                started.append((to_device(*batch), side.record_event()))
            copies.append(started[-1][1])
        else:  # the main stream's memory
            started.append((to_device(*batch), main.record_event()))
        if len(started) > ahead:
            yield _wait_for(*started.popleft(), module.current_stream(device))
    while started:
        yield _wait_for(*started.popleft(), module.current_stream(device))


def _wait_for(micro: MicroBatch, event: Any, main: Any) -> MicroBatch:
    """Make the main stream wait until a micro-batch is ready."""
    main.wait_event(event)
    return micro

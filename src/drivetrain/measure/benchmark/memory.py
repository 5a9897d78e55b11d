"""How many arms of a benchmark may be live at once: each keeps its memory while it waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from drivetrain.core.device import peak_memory
from drivetrain.core.world import World
from drivetrain.loader.resident import free_memory

MARGIN = 1.2  # an arm may need more than the measured ones
CONTEXT = 2**30  # bytes of a process on an accelerator beyond its tensors: driver, kernels, libraries


class Reading(NamedTuple):
    """The memory of an arm's device after the arm's warm-up, in bytes."""

    used: int  # by the arm
    free: int | None  # None where the device does not say


def read(device: Any, world: World) -> Reading:
    """Read the memory of rank 0's device; on a CPU all ranks of this machine share it."""
    if device.type == "cpu":
        return Reading(world.local_size * peak_memory(device), free_memory(device))
    import torch

    module = torch.get_device_module(device)
    reserved = getattr(module, "max_memory_reserved", None) or module.driver_allocated_memory  # MPS has the latter
    return Reading(int(reserved()) + CONTEXT, free_memory(device))


def fits(need: int | None, live: Sequence[Reading]) -> bool:
    """Whether an arm fits beside live ones, of which the last was read last. `need`: its own memory, where it has run already."""
    if not live or live[-1].free is None:
        return True
    return MARGIN * (need or max(reading.used for reading in live)) <= live[-1].free


def ran_out(reason: str) -> bool:
    """Whether an arm's error is want of memory: torch's own words, and those of cuBLAS and cuDNN."""
    return any(words in reason for words in ("out of memory", "ALLOC_FAILED", "can't allocate memory"))

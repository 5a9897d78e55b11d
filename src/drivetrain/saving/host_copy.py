"""Copies a training state to the memory of the CPU, without the training loop waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


class HostCopy:
    """A copy of all tensors in nested containers, as they are now. `wait` returns it; any thread may call it.

    The copies are queued on the devices: behind the work so far, and before the next update, which overwrites the tensors.
    From CUDA, torch copies to pinned memory; to other memory the device could not write by itself. Pinned memory is costly
    to allocate, so torch keeps what one copy has released for the next one.
    """

    def __init__(self, values: Any) -> None:
        self._devices: set[torch.device] = set()
        self._values = tree_map(self._copy, values)
        self._events = [torch.Event(device) for device in self._devices if device.type != "cpu"]
        for event in self._events:
            event.record()

    def _copy(self, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        self._devices.add(value.device)
        return value.detach().to("cpu", copy=True, non_blocking=True)

    def wait(self) -> Any:
        """Return the copies, once the devices have written them."""
        for event in self._events:
            event.synchronize()
        return self._values

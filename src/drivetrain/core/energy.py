"""What a device counts itself, such as its energy: NVIDIA's GPUs (the energy since Volta), read by pynvml (nvidia-ml-py).

The counter is the whole GPU's, with whatever else runs on it. A MIG slice has none. A CPU has one too (RAPL), but for the
whole machine, and Linux shows it to root alone: so a run on a CPU has no energy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from drivetrain.core.lazy import torch


def used(device: torch.device) -> tuple[str, float] | None:
    """The device's own id and the joules that it has used so far; None where nothing tells."""
    return _told(device, lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)


def busy(device: torch.device) -> float | None:
    """The share of the last moments in which the device computed; None where nothing tells."""
    found = _told(device, lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
    return None if found is None else found[1]


def _told(device: torch.device, question: Callable[[Any, Any], float]) -> tuple[str, float] | None:
    """The device's own id and its answer; None where nothing tells."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    if (pynvml := _nvml()) is None:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        pynvml.nvmlInit()
        return uuid, question(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError:
        return None


@cache
def _nvml() -> Any:
    """The package pynvml; None where it is not installed. A search that finds nothing takes a while, so there is one."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def total(before: list[Any], after: list[Any]) -> float | None:
    """The joules that the devices of all ranks have used between two readings, each device once; None where one did not tell."""
    if None in before or None in after or not after:
        return None
    first, last = dict(before), dict(after)
    return sum(last[device] - first[device] for device in last) if first.keys() == last.keys() else None

"""The energy that a device has used, where it counts that itself: NVIDIA's GPUs since Volta, read by pynvml (nvidia-ml-py).

The counter is the whole GPU's, with whatever else runs on it. A MIG slice has none. A CPU has one too (RAPL), but for the
whole machine, and Linux shows it to root alone: so a run on a CPU has no energy.
"""

from __future__ import annotations

from typing import Any

from drivetrain.core.lazy import torch


def used(device: torch.device) -> tuple[str, float] | None:
    """The device's own id and the joules that it has used so far; None where nothing tells."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        import pynvml
    except ImportError:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        pynvml.nvmlInit()
        return uuid, pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByUUID(uuid)) / 1e3
    except pynvml.NVMLError:
        return None


def total(before: list[Any], after: list[Any]) -> float | None:
    """The joules that the devices of all ranks have used between two readings, each device once; None where one did not tell."""
    if None in before or None in after or not after:
        return None
    first, last = dict(before), dict(after)
    return sum(last[device] - first[device] for device in last) if first.keys() == last.keys() else None

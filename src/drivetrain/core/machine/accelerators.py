"""The accelerators that this process can use, found without starting them.

CUDA, ROCm and XPU do not survive a fork, and ranks, jobs of a sweep and measured variants are forked. A process that asks
torch.cuda.is_available() or a device's name has started the device. So NVIDIA's driver is asked by a separate program, and the
others by torch in a forked child.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

from drivetrain.core.lazy import torch
from drivetrain.core.machine import forking, nvidia_driver

# The environment variables that hide devices: where one changes, what was found before no longer counts.
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "CUDA_DEVICE_ORDER")
TYPES = ("cuda", "xpu", "mps")  # those that runs are made for; torch names AMD's devices cuda, too
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Accelerator:
    """The devices of one type that torch can use here."""

    type: str = "cpu"  # as torch names it; cpu: there is no other device
    count: int = 0
    capability: tuple[int, int] = (0, 0)  # CUDA's lowest compute capability; under ROCm the architecture, 9.4 for gfx94x
    rocm: bool = False
    problem: str = ""  # why torch cannot use a device that the machine has


def find() -> Accelerator:
    """The accelerator that torch was built for, where it can be used. Imports torch, and does not start the device."""
    return _find(_visibility())


def device_count() -> int:
    """The number of devices that ranks of this process can have. Imports no torch for NVIDIA's, and does not start them."""
    built_for = re.search(r"\+(rocm|xpu|cpu)", metadata.version("torch"))
    if built_for is None:
        return _nvidia_devices(_visibility()).count if nvidia_driver.installed() else 0
    return find().count if built_for[1] != "cpu" else 0


def _visibility() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in VISIBILITY)


@cache
def _nvidia_devices(visibility: tuple[str | None, ...]) -> nvidia_driver.Devices:
    return nvidia_driver.devices()


@cache
def _find(visibility: tuple[str | None, ...]) -> Accelerator:
    device = torch.accelerator.current_accelerator()  # that torch was built for: it looks at no device
    if device is None or device.type not in TYPES:
        return Accelerator()
    if device.type == "cuda" and torch.version.hip is None:
        return _nvidia(visibility)
    if device.type == "mps":  # one device: no process with it is forked
        return Accelerator("mps", 1) if torch.backends.mps.is_available() else Accelerator()
    # A process that has used the device cannot fork a child that does.
    started = torch.get_device_module(device.type).is_initialized()
    return ask_torch(device.type) if started else _ask_in_child(device.type)


def _nvidia(visibility: tuple[str | None, ...]) -> Accelerator:
    if not nvidia_driver.installed():
        return Accelerator()
    found, needed = _nvidia_devices(visibility), str(torch.version.cuda)
    if found.count and found.cuda < int(needed.partition(".")[0]):
        return Accelerator(problem=f"NVIDIA's driver runs CUDA {found.cuda}, and this torch was built for CUDA {needed}")
    return Accelerator("cuda", found.count, found.capability) if found.count else Accelerator(problem=found.problem)


def ask_torch(type_: str) -> Accelerator:
    """The device as torch describes it; torch starts it in this process."""
    module: Any = torch.get_device_module(type_)
    try:
        module.init()
        count = int(module.device_count())
        capability = min(module.get_device_capability(n) for n in range(count)) if type_ == "cuda" else (0, 0)
    except (RuntimeError, AssertionError) as error:
        return Accelerator(problem=str(error).splitlines()[0])
    return Accelerator(type_, count, capability, rocm=torch.version.hip is not None) if count else Accelerator()


def _ask_in_child(type_: str) -> Accelerator:
    """The device as a forked process finds it, which gets nothing of it where this one has asked for it before."""

    def work(answer: Callable[[Accelerator | None], None]) -> None:
        answer(None if torch.get_device_module(type_)._is_in_bad_fork() else ask_torch(type_))

    try:
        return forking.answer_of(work, "it does not answer", TIMEOUT_S) or ask_torch(type_)
    except forking.NoAnswer as error:
        return Accelerator(problem=str(error))


def used(device: torch.device) -> tuple[str, float] | None:
    """The device's own id and the joules that it has used so far; None without a counter."""
    return _told(device, lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)


def busy(device: torch.device) -> float | None:
    """The share of the last moments in which the device computed; None without a counter."""
    found = _told(device, lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
    return None if found is None else found[1]


def _told(device: torch.device, question: Callable[[Any, Any], float]) -> tuple[str, float] | None:
    """The device's own id and its answer; None without one."""
    if device.type != "cuda" or torch.version.hip is not None or (pynvml := _nvml()) is None:
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


def total(before: Sequence[tuple[str, float] | None], after: Sequence[tuple[str, float] | None]) -> float | None:
    """The joules that the devices of all ranks have used between two readings, each once; None where one has no counter."""
    first, last = dict(filter(None, before)), dict(filter(None, after))
    if None in before or None in after or not after:
        return None
    return sum(last[device] - first[device] for device in last) if first.keys() == last.keys() else None

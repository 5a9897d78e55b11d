"""Shares of an update's time by the activity of the device and the host."""

from __future__ import annotations

import time
from collections.abc import Iterable

from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from drivetrain.core.machine.device import synchronize
from drivetrain.debug.profile import silence_profiler
from drivetrain.engine.trainer import Trainer
from drivetrain.measure.profile.phases import TrackedStream, update

END = "drivetrain: end"
IDLE = "the device is idle"
PROFILED = 5  # updates
SYNCHRONIZING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def device_shares(trainer: Trainer, stream: TrackedStream) -> dict[str, float]:
    """Shares of an update's time: of an accelerator in kernels and copies, and of the host in waits for it.

    Empty if the profiler records nothing of the device.
    """
    silence_profiler()
    # The host, and the device if the profiler supports its type: CUDA and XPU, not MPS.
    of_device = getattr(ProfilerActivity, trainer.device.type.upper(), ProfilerActivity.CPU)
    with profile(activities=[*{ProfilerActivity.CPU, of_device}]) as profiler:
        began = time.perf_counter()
        for _ in range(PROFILED):
            update(trainer, stream)
        with record_function(END):
            synchronize(trainer.device)
        whole_us = 1e6 * (time.perf_counter() - began)
    return _device_shares(profiler.events() or [], whole_us)


def _device_shares(events: Iterable[FunctionEvent], whole_us: float) -> dict[str, float]:
    on_host = [e for e in events if e.device_type == DeviceType.CPU]
    # A named range of the host, such as torch's range of the optimizer, is also an event of the device, with its gaps.
    on_device = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
    if not on_device:
        return {}
    copies = [e for e in on_device if e.name.startswith("Memcpy")]
    end = next(e.time_range.start for e in on_host if e.name == END)  # the profile's own synchronization comes after it
    waits = sum(e.time_range.end - e.time_range.start for e in on_host if e.name in SYNCHRONIZING and e.time_range.end < end)
    return {
        "the device computes": _union_us(e for e in on_device if not e.name.startswith("Memcpy")) / whole_us,
        "the device copies": _union_us(copies) / whole_us,
        IDLE: max(0.0, whole_us - _union_us(on_device)) / whole_us,
        "the host waits for the device": waits / whole_us,
    }


def _union_us(events: Iterable[FunctionEvent]) -> float:
    """Microseconds in which at least one of the events runs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((e.time_range.start, e.time_range.end) for e in events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total

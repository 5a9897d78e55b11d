"""How an update uses the device, by torch's profiler: computing, copying, idle."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from drivetrain.core.device import synchronize
from drivetrain.debug.profile import silence_profiler
from drivetrain.measure.profile.lines import TrackedStream, update

READING, END = "drivetrain: reading", "drivetrain: end"
IDLE = "the device is idle"
UPDATES = 5
SYNCHRONIZING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def time_shares(trainer: Any, stream: TrackedStream) -> dict[str, float]:
    """Shares of an update's time; empty where the profiler sees nothing of the device.

    On an accelerator these are the device's own times of kernels and copies, and beside them the host's time waiting for it.
    On a CPU it is the time in operations, and the time between them, which is Python's and torch's dispatcher's.
    """
    silence_profiler()
    with profile(activities=_activities(trainer.device)) as profiler:
        began = time.perf_counter()
        marked = _MarkedStream(stream)
        for _ in range(UPDATES):
            update(trainer, marked)
        with record_function(END):
            synchronize(trainer.device)
        whole_us = 1e6 * (time.perf_counter() - began)
    events = profiler.events() or []
    return _cpu_shares(events, whole_us) if trainer.device.type == "cpu" else _device_shares(events, whole_us)


def _activities(device: torch.device) -> list[ProfilerActivity]:
    """What the profiler records: the host, and the device where the profiler knows its type (CUDA, XPU; not MPS)."""
    known = getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.CPU)
    return [ProfilerActivity.CPU] if known is ProfilerActivity.CPU else [ProfilerActivity.CPU, known]


class _MarkedStream:
    """The stream; its reads appear in the profile as READING."""

    def __init__(self, stream: TrackedStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with record_function(READING):
            return next(self._stream)


def _cpu_shares(events: Iterable[Any], whole_us: float) -> dict[str, float]:
    outermost = [e for e in events if e.cpu_parent is None]
    own_threads = {e.thread for e in outermost if e.name == READING}  # excludes the loader's threads
    reading = _union_us(e for e in outermost if e.name == READING)
    computing = _union_us(e for e in outermost if e.name not in (READING, END) and e.thread in own_threads)
    if not computing:
        return {}
    between = max(0.0, whole_us - reading - computing)
    return {"in operations": computing / whole_us, "between operations (Python, dispatch)": between / whole_us}


def _device_shares(events: Iterable[Any], whole_us: float) -> dict[str, float]:
    on_host = [e for e in events if e.device_type == torch.autograd.DeviceType.CPU]
    # A named range of the host, such as torch's own of the optimizer, is repeated on the device, with the gaps in it.
    on_device = [e for e in events if e.device_type != torch.autograd.DeviceType.CPU and not e.is_user_annotation]
    if not on_device:
        return {}
    copies = [e for e in on_device if e.name.startswith("Memcpy")]
    end = next(e.time_range.start for e in on_host if e.name == END)  # the profile's own synchronization comes after it
    waits = sum(e.time_range.elapsed_us() for e in on_host if e.name in SYNCHRONIZING and e.time_range.end < end)
    return {
        "the device computes": _union_us(e for e in on_device if not e.name.startswith("Memcpy")) / whole_us,
        "the device copies": _union_us(copies) / whole_us,
        IDLE: max(0.0, whole_us - _union_us(on_device)) / whole_us,
        "the host waits for the device": waits / whole_us,
    }


def _union_us(events: Iterable[Any]) -> float:
    """Microseconds in which at least one of the events runs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((e.time_range.start, e.time_range.end) for e in events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total

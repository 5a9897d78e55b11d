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
UPDATES = 5
SYNCHRONIZING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def time_shares(trainer: Any, stream: TrackedStream) -> dict[str, float]:
    """Shares of an update's time; empty where the profiler sees nothing of the device.

    On CUDA these are the device's own times of kernels and copies, and beside them the host's time waiting for the device.
    On a CPU it is the time in operations, and the time between them, which is Python's and torch's dispatcher's.
    """
    silence_profiler()
    on_cuda = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler:
        began = time.perf_counter()
        marked = _MarkedStream(stream)
        for _ in range(UPDATES):
            update(trainer, marked)
        with record_function(END):
            synchronize(trainer.device)
        whole_us = 1e6 * (time.perf_counter() - began)
    on_cpu = torch.autograd.DeviceType.CPU
    events = [e for e in profiler.events() or [] if e.device_type == on_cpu or e.name not in (READING, END)]
    return _cuda_shares(events, whole_us) if on_cuda else _cpu_shares(events, whole_us)


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


def _cuda_shares(events: Iterable[Any], whole_us: float) -> dict[str, float]:
    on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    if not on_device:
        return {}
    copies = [e for e in on_device if e.name.startswith("Memcpy")]
    end = next(e.time_range.start for e in events if e.name == END)  # the profile's own synchronization comes after it
    waits = sum(e.time_range.elapsed_us() for e in events if e.name in SYNCHRONIZING and e.time_range.end < end)
    return {
        "the device computes": _union_us(e for e in on_device if not e.name.startswith("Memcpy")) / whole_us,
        "the device copies": _union_us(copies) / whole_us,
        "the device is idle": max(0.0, whole_us - _union_us(on_device)) / whole_us,
        "the host waits for the device": waits / whole_us,
    }


def _union_us(events: Iterable[Any]) -> float:
    """Microseconds in which at least one of the events runs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((e.time_range.start, e.time_range.end) for e in events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total

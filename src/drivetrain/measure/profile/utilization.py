"""What the device does during an update: it computes, it copies, or nothing reaches it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from drivetrain.core.device import synchronize
from drivetrain.debug.profile import silence_profiler
from drivetrain.measure.profile.lines import Stream, update

READING, END = "drivetrain: reading", "drivetrain: end"
UPDATES = 5
SYNCHRONIZING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def occupied(trainer: Any, stream: Stream) -> dict[str, float]:
    """Shares of an update's time, by torch's profiler; empty where that sees nothing of the device.

    On CUDA kernels and copies are the device's own times, and what the host waits for it runs beside them. On a CPU an
    operation is its time; between two of them are Python and torch's dispatcher.
    """
    silence_profiler()
    on_cuda = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as seen:
        began = time.perf_counter()
        marked = _Marked(stream)
        for _ in range(UPDATES):
            update(trainer, marked)
        with record_function(END):
            synchronize(trainer.device)
        whole_us = 1e6 * (time.perf_counter() - began)
    events = [e for e in seen.events() or [] if e.device_type == torch.autograd.DeviceType.CPU or e.name not in (READING, END)]
    return _of_cuda(events, whole_us) if on_cuda else _of_cpu(events, whole_us)


class _Marked:
    """The stream, whose reading stands in the profile by name."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with record_function(READING):
            return next(self._stream)


def _of_cpu(events: Iterable[Any], whole_us: float) -> dict[str, float]:
    outermost = [e for e in events if e.cpu_parent is None]
    mine = {e.thread for e in outermost if e.name == READING}  # not the loader's threads
    reading = _covered(e for e in outermost if e.name == READING)
    computing = _covered(e for e in outermost if e.name not in (READING, END) and e.thread in mine)
    if not computing:
        return {}
    between = max(0.0, whole_us - reading - computing)
    return {"inside of operations": computing / whole_us, "between them: Python, dispatch": between / whole_us}


def _of_cuda(events: Iterable[Any], whole_us: float) -> dict[str, float]:
    on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    if not on_device:
        return {}
    copies = [e for e in on_device if e.name.startswith("Memcpy")]
    end = next(e.time_range.start for e in events if e.name == END)  # our own waiting comes after it
    waits = sum(e.time_range.elapsed_us() for e in events if e.name in SYNCHRONIZING and e.time_range.end < end)
    return {
        "the device computes": _covered(e for e in on_device if not e.name.startswith("Memcpy")) / whole_us,
        "the device copies": _covered(copies) / whole_us,
        "the device is idle": max(0.0, whole_us - _covered(on_device)) / whole_us,
        "the host waits for the device": waits / whole_us,
    }


def _covered(events: Iterable[Any]) -> float:
    """Microseconds in which at least one of them runs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((e.time_range.start, e.time_range.end) for e in events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total

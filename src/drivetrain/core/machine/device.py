"""Questions to a device: synchronising, memory in use, running out of memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, ParamSpec, TypeVar

from drivetrain.core.lazy import torch

# Messages of the allocators of a CPU and of MPS, of CUDA itself, and of cuBLAS for its workspace.
_OUT_OF_MEMORY = ("can't allocate memory", "MPS backend out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def keep_freed_memory() -> bool:
    """Keep freed memory in this process instead of returning it to the system; False where the C library is not glibc.

    Otherwise the system takes back a step's activations and hands them out again page by page, zeroed. That costs up to a
    third of a step on a CPU, and a different part of it in every process, depending on the layout of the heap.
    """
    import ctypes

    trim_threshold, mmap_threshold, most = -1, -3, 2**31 - 1  # mallopt(3)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # An older glibc accepts at most half of the largest heap of a thread.
    return bool(mallopt(trim_threshold, most) and (mallopt(mmap_threshold, most) or mallopt(mmap_threshold, 2**25)))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work; a CPU has none."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums over many samples: float64, or float32 on devices without it (MPS, some of Intel's GPUs)."""
    lacks = device.type == "mps" or (device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64)
    return torch.float32 if lacks else torch.float64


def peak_memory(device: torch.device) -> int:
    """The peak in bytes of the device's allocator, or on a CPU of this process's resident set."""
    if device.type == "cpu":
        return peak_memory_of_process()
    if device.type == "mps":  # it keeps no peak: the memory that Metal holds for this process, which seldom shrinks
        return torch.mps.driver_allocated_memory()
    return torch.accelerator.max_memory_allocated(device)


def peak_memory_of_process() -> int:
    """The peak of this process's resident set in bytes."""
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_of_process() -> int:
    """The bytes of this process's resident set, with the library pages of its parent.

    The system counts them for a fork only once it uses them.
    """
    try:
        (resident, shared), (_, of_parent) = (_pages(pid) for pid in ("self", os.getppid()))
    except OSError:
        return memory_now()
    return (resident - shared + max(shared, of_parent)) * os.sysconf("SC_PAGE_SIZE")


def _pages(pid: int | str) -> tuple[int, int]:
    """The resident pages of a process, and how many of them are a file's."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return resident, shared


def memory_now() -> int:
    """The bytes in use now: the device allocator's if it has been used, else this process's resident set."""
    device = torch.accelerator.current_accelerator()  # the type that torch was built for: no device is queried
    if device is not None and device.type != "mps" and torch.get_device_module(device).is_initialized():
        return torch.accelerator.memory_reserved()
    try:
        return _pages("self")[0] * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory_of_process()


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error is a failed allocation. torch's exception type covers only its allocators for CUDA and XPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)


P = ParamSpec("P")
R = TypeVar("R")

ON_PURPOSE: set[CodeType] = set()


def reads_device_on_purpose(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function, such as the one that logs, whose reads from the device (and its callees') are intended."""
    ON_PURPOSE.add(function.__code__)
    return function


Mark = Any  # a point in time: seconds of the host's clock, or an event in the device's queue


class Clock:
    """The host's clock: a CPU finishes its work before a call returns, so a mark is the time of the call."""

    mark: Callable[[], Mark] = staticmethod(time.perf_counter)  # marks this point in the device's work

    def passed(self, mark: Mark) -> bool:
        """Return whether the device has finished all work before the mark, so that reading it does not wait."""
        return True

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks. Waits until the device has passed `end`."""
        return float(end - start)

    def total(self, intervals: Sequence[tuple[Mark, Mark]]) -> float:
        """Return the total seconds of these intervals, and take their marks back. Waits as `seconds` does."""
        return float(sum([end - start for start, end in intervals]))

    def reuse(self, mark: Mark) -> None:
        """Take back a mark that is no longer needed."""


class DeviceClock(Clock):
    """Marks are events in the device's queue, which the device stamps when it reaches them.

    The host only queues work, and may be many steps ahead: its own clock would measure how fast work is queued. The host reads a
    step's marks in about 20 µs, which cost nothing while the device is busy with later steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Event] = []

    def mark(self) -> Mark:
        event = self._free.pop() if self._free else torch.Event(self._device, enable_timing=True)
        event.record()  # into the current stream
        return event

    def passed(self, mark: Mark) -> bool:
        return bool(mark.query())

    def seconds(self, start: Mark, end: Mark) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def total(self, intervals: Sequence[tuple[Mark, Mark]]) -> float:
        seconds = sum(self.seconds(*interval) for interval in intervals)
        self._free += [mark for interval in intervals for mark in interval]
        return seconds

    def reuse(self, mark: Mark) -> None:
        self._free.append(mark)


def clock_for(device: torch.device) -> Clock:
    """Return the device's clock. Absent devices, such as those of fake tensors, have no queue."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return DeviceClock(device) if accelerator is not None and device.type == accelerator.type else Clock()

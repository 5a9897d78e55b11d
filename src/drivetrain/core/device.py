"""What is asked of a device: to wait for it, how much memory it holds, whether it ran out."""

from __future__ import annotations

import os

from drivetrain.core.lazy import torch


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, until it ends; whether its C library (glibc) can.

    Else a step's activations go back to the system after each use and come again page by page, all zeroed: up to a third of
    a step on a CPU, and more or less of it in every process, as the heap happens to lie.
    """
    import ctypes

    trim_threshold, mmap_threshold, most = -1, -3, 2**31 - 1  # mallopt(3)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # An older glibc takes no more than half of what a thread's own heap may hold.
    return bool(mallopt(trim_threshold, most) and (mallopt(mmap_threshold, most) or mallopt(mmap_threshold, 2**25)))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak: the CUDA allocator's, else this process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_memory_of_process()


def peak_memory_of_process() -> int:
    """Bytes of this process's resident set at its peak."""
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_now() -> int:
    """Bytes held now: CUDA's reserved memory, else this process's resident set."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.memory_reserved()
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory(torch.device("cpu"))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on CUDA, or on the CPU, where torch has no type for it."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)

"""The process: device, seeds, threads, and the flags of torch's backends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

from drivetrain import rng
from drivetrain.cores import usable_cores
from drivetrain.lazy import torch
from drivetrain.plan import World
from drivetrain.spec import Count, CountOrZero, Part, Run


class Runtime(Part):
    """Where and how reproducibly a run runs."""

    operators = ("device", "threads")

    def __init__(
        self,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        seed: CountOrZero = 0,
        threads: Count | None = None,
        cudnn_benchmark: bool = True,
        deterministic: bool = False,
        zero_grad: Literal["none", "memset"] = "none",
        keep_memory: bool = True,
    ) -> None:
        self.device, self.seed, self.threads, self.zero_grad = device, seed, threads, zero_grad
        self.cudnn_benchmark, self.deterministic = cudnn_benchmark, deterministic
        self.keep_memory = keep_memory

    def check(self, run: Run) -> Iterator[str]:
        if self.deterministic and self.cudnn_benchmark:
            yield (
                "runtime.deterministic=true and runtime.cudnn_benchmark=true exclude each other "
                "(the autotuner picks kernels by timing): set runtime.cudnn_benchmark=false"
            )

    def verify(self, run: Run) -> Iterator[str]:
        if self.device == "cuda" and not torch.cuda.is_available():
            yield "runtime.device=cuda, but torch finds no CUDA device: set runtime.device=cpu or auto"

    def kind(self) -> str:
        """The device type that `device` means here."""
        return ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device

    def start(self, world: World) -> torch.device:
        """Set the process up and return its device."""
        device = torch.device(f"cuda:{world.local_rank}" if self.kind() == "cuda" else "cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.set_num_threads(self.threads or usable_cores(world.local_size))
        if self.keep_memory and device.type == "cpu":
            keep_freed_memory()
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if self.deterministic != torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(self.deterministic)
        torch.manual_seed(rng.mix(self.seed, 3))  # the model starts the same on every rank
        return device

    def seed_rank(self, world: World) -> None:
        """From here on each rank's own stream (dropout) differs."""
        torch.manual_seed(rng.mix(self.seed, 4, world.rank))

    def zero(self, parameters: list[torch.nn.Parameter]) -> None:
        """Forget the gradients. None, not zero: no memset, and the next backward writes where it would add."""
        if self.zero_grad == "memset":
            torch._foreach_zero_([p.grad for p in parameters if p.grad is not None])
        else:
            for p in parameters:
                p.grad = None


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
    if torch.cuda.is_initialized():
        return torch.cuda.memory_reserved()
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory(torch.device("cpu"))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on CUDA, or on the CPU, where torch has no type for it."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)

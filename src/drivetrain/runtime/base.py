"""Sets up the process: device, seeds, threads, and the flags of torch's backends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

from drivetrain.core import rng
from drivetrain.core.cpus import usable_cores
from drivetrain.core.device import keep_freed_memory
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, CountOrZero, Option, RunSpec
from drivetrain.core.world import World


class Runtime(Option):
    """The device, the seed, the CPU threads and the backend flags of a run."""

    machine_local_keys = ("device", "threads")

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

    def validate(self, run: RunSpec) -> Iterator[str]:
        if self.deterministic and self.cudnn_benchmark:
            yield (
                "runtime.deterministic=true and runtime.cudnn_benchmark=true exclude each other "
                "(the autotuner picks kernels by timing): set runtime.cudnn_benchmark=false"
            )

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if self.device == "cuda" and not torch.cuda.is_available():
            yield "runtime.device=cuda, but torch finds no CUDA device: set runtime.device=cpu or auto"

    def device_type(self) -> str:
        """Return the device type, with `auto` resolved."""
        return ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device

    def set_up_process(self, world: World) -> torch.device:
        """Set up the process and return its device."""
        device = torch.device(f"cuda:{world.local_rank}" if self.device_type() == "cuda" else "cpu")
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
        """Seed each rank differently from here on, for dropout."""
        torch.manual_seed(rng.mix(self.seed, 4, world.rank))

    def zero(self, parameters: list[torch.nn.Parameter]) -> None:
        """Clear the gradients. None rather than zero saves the memset, and the next backward writes instead of adding."""
        if self.zero_grad == "memset":
            torch._foreach_zero_([p.grad for p in parameters if p.grad is not None])
        else:
            for p in parameters:
                p.grad = None

"""NVTX ranges for NVIDIA's profilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, CountOrZero, RunSpec
from drivetrain.debug.window import Window


class Nvtx(Window):
    """Adds NVTX ranges for the phases of a step, and for each operation in a window that Nsight Systems can capture alone:

    nsys profile --capture-range=cudaProfilerApi drivetrain train debug=nvtx …
    """

    effect = "exact"

    def __init__(self, skip: CountOrZero = 10, window: Count = 10, operations: bool = True, shapes: bool = False) -> None:
        super().__init__(skip, window)
        self.operations, self.shapes = operations, shapes

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.runtime.device == "cpu":
            yield "debug=nvtx marks ranges for NVIDIA's profilers, and runtime.device=cpu has none: set debug=profile"
        if self.shapes and not self.operations:
            yield "debug.shapes=true is of operations, and debug.operations=false leaves them out: set one of them otherwise"

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if run.runtime.device != "cpu" and (device := run.runtime.device_type()) != "cuda":
            found = "torch finds none" if device == "cpu" else f"this run's is {device}"
            yield f"debug=nvtx needs a CUDA device, and {found}: set debug=profile"

    def mark(self, name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name)

    @contextmanager
    def record(self, warmup: int, window: int) -> Iterator[Callable[[], None]]:
        with ExitStack() as stack:
            torch.cuda.synchronize()  # work queued before does not belong to the window
            torch.cuda.profiler.start()
            stack.callback(torch.cuda.profiler.stop)
            stack.callback(torch.cuda.synchronize)
            if self.operations:
                stack.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=self.shapes))
            yield lambda: None

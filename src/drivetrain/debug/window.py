"""The base of profiling and NVTX ranges: a window of updates after a warm-up, with a named range for each phase of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

from drivetrain.core.lazy import torch
from drivetrain.core.options.option import BuildContext, Count, CountOrZero, RunSpec
from drivetrain.core.step.microbatch import one_update
from drivetrain.core.step.step import Stream, StreamWatcher
from drivetrain.debug.base import Debug, P

Mark = Callable[[str], AbstractContextManager[object]]


class Window(Debug):
    """The base of options that record the updates `skip + warmup + 1` to `skip + warmup + window`, on rank 0."""

    warmup = 0  # updates for the profiler's own warm-up

    def __init__(self, skip: int, window: int) -> None:
        self.skip, self.window = skip, window

    def advise(self, run: RunSpec) -> Iterator[str]:
        last, updates = self.skip + self.warmup + self.window, run.values["updates"]
        if updates is not None and last > updates:
            yield (
                f"{run.named('debug')} looks at updates up to {last}, but updates={updates}: "
                "it will look at the last ones; lower debug.skip or debug.window, or raise updates"
            )

    def mark(self, name: str) -> AbstractContextManager[object]:
        """Return a context that marks a named range of the step."""
        raise self.unwritten("mark")

    def record(self, warmup: int, window: int) -> AbstractContextManager[Callable[[], None]]:
        """Return the context of warm-up and window, in updates. It yields a function to call after each update."""
        raise self.unwritten("record")

    def setup(self, context: BuildContext) -> None:
        self._context = context

    def wrap_precision(self, precision: P) -> P:
        return cast(P, MarkedPrecision(precision, self.mark)) if self._context.world.rank == 0 else precision

    def stream_watchers(self) -> list[StreamWatcher]:
        return [self._record_window] if self._context.world.rank == 0 else []

    def _record_window(self, stream: Stream) -> Stream:
        """Yield the stream and record the window. If the run is too short, the window ends with its last update."""
        remaining = self._context.horizon.updates - self._context.progress.updates
        window = min(self.window, max(1, remaining - self.warmup))
        warmup = min(self.warmup, remaining - window)
        for _ in range(min(self.skip, remaining - window - warmup)):
            yield from one_update(stream)
        with self.record(warmup, window) as end_update:
            for _ in range(warmup + window):
                yield from one_update(self._mark_data(stream))
                end_update()
        yield from stream

    def _mark_data(self, stream: Stream) -> Stream:
        while True:
            with self.mark("data"):
                micro = next(stream, None)
            if micro is None:
                return
            yield micro


class MarkedPrecision:
    """Wraps a precision and marks its methods, the phases of a step, as named ranges."""

    def __init__(self, precision: Any, mark: Mark) -> None:
        self._precision, self._mark = precision, mark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._precision, name)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        with self._mark("forward" if torch.is_grad_enabled() else "evaluate"), self._precision.autocast():
            yield

    def backward(self, loss: torch.Tensor, weight: torch.Tensor) -> None:
        with self._mark("backward"):
            self._precision.backward(loss, weight)

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], bool | None]) -> bool:
        with self._mark("update"):
            return bool(self._precision.step(optimizer, clip))


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
            yield "debug.shapes=true describes operations, and debug.operations=false leaves them out: change one of them"

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if run.runtime.device != "cpu" and (device := run.runtime.device_type()) != "cuda":
            found = "torch finds none" if device == "cpu" else f"this run's is {device}"
            yield f"debug=nvtx needs a CUDA device, and {found}: set debug=profile"

    def mark(self, name: str) -> AbstractContextManager[object]:
        return torch.cuda.nvtx.range(name)

    @contextmanager
    def record(self, warmup: int, window: int) -> Iterator[Callable[[], None]]:
        with ExitStack() as stack:
            torch.cuda.synchronize()  # earlier queued work does not belong to the window
            torch.cuda.profiler.start()
            stack.callback(torch.cuda.profiler.stop)
            stack.callback(torch.cuda.synchronize)
            if self.operations:
                stack.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=self.shapes))
            yield lambda: None

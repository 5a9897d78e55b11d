"""What profiling and NVTX marks share: a window of updates after a warm-up, and a name for each phase of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch, one_update
from drivetrain.core.option import RunSpec
from drivetrain.core.step import StreamWatcher
from drivetrain.debug.base import Debug

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext

Mark = Callable[[str], AbstractContextManager[Any]]


class Window(Debug):
    """The base of options that look at the updates `skip + warmup + 1` to `skip + warmup + window`, on rank 0."""

    warmup = 0  # updates that the option's own machinery warms up with

    def __init__(self, skip: int, window: int) -> None:
        self.skip, self.window = skip, window

    def advise(self, run: RunSpec) -> Iterator[str]:
        asked, updates = self.skip + self.warmup + self.window, run.values["updates"]
        if updates is not None and asked > updates:
            yield (
                f"{run.named('debug')} looks at updates up to {asked}, but updates={updates}: "
                "it will look at the last ones; lower debug.skip or debug.window, or raise updates"
            )

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """A named range of the step."""
        raise NotImplementedError

    def looking(self, warmup: int, window: int) -> AbstractContextManager[Callable[[], None]]:
        """The context of warm-up and window, in updates; what it gives is called after each of them."""
        raise NotImplementedError

    def setup(self, context: BuildContext) -> None:
        self._context = context

    def wrap_precision(self, precision: Any) -> Any:
        return Marked(precision, self.mark) if self._context.world.rank == 0 else precision

    def stream_watchers(self) -> list[StreamWatcher]:
        return [self._watched] if self._context.world.rank == 0 else []

    def _watched(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The stream, whose window is looked at. A run too short for it has it end with its last update."""
        left = self._context.horizon.updates - self._context.progress.updates
        window = min(self.window, max(1, left - self.warmup))
        warmup = min(self.warmup, left - window)
        for _ in range(min(self.skip, left - window - warmup)):
            yield from one_update(stream)
        with self.looking(warmup, window) as updated:
            for _ in range(warmup + window):
                yield from one_update(self._marked(stream))
                updated()
        yield from stream

    def _marked(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        while True:
            with self.mark("data"):
                micro = next(stream, None)
            if micro is None:
                return
            yield micro


class Marked:
    """A precision whose hooks, the phases of a step, are named ranges; in all else the precision itself."""

    def __init__(self, precision: Any, mark: Mark) -> None:
        self._precision, self._mark = precision, mark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._precision, name)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        with self._mark("forward" if torch.is_grad_enabled() else "evaluate"), self._precision.autocast():
            yield

    def backward(self, loss: Any, weight: Any) -> None:
        with self._mark("backward"):
            self._precision.backward(loss, weight)

    def step(self, optimizer: Any, clip: Callable[[], None]) -> bool:
        with self._mark("update"):
            return self._precision.step(optimizer, clip)

"""A step and a loader that a recorder looks at: they do what those of the run do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.core import streams
from drivetrain.core.microbatch import MicroBatch, Request
from drivetrain.core.step import WrappingStep

if TYPE_CHECKING:
    from drivetrain.measure.certify.record import Recorder


@dataclass(eq=False)
class WatchedStep(WrappingStep):
    """The run's own step, with a look at what stands before and after its update."""

    recorder: Recorder
    made: bool = False
    before: float = 0.0  # the running sum of losses before this update
    loss: Callable[[], float] = field(default=float)
    begun: bool = False

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        if not self.begun:
            self.begun, self.before = True, float(loss_sum)
        self.loss = lambda: float(loss_sum)
        state = streams.state()
        self.recorder.rounding(self.inner.micro_batch)(batch, loss_sum)
        if any(not torch.equal(now, state[kind]) for kind, now in streams.state().items()):
            self.recorder.trace.random = ["the forward"]

    def update(self) -> bool:
        self.now, self.begun = self.loss(), False
        self.recorder.before_update()
        self.made = self.inner.update()
        return self.made

    def zero_grad(self) -> None:
        self.recorder.after_update(self.now - self.before, self.made)
        self.inner.zero_grad()


class NotingLoader:
    """A loader that notes its requests: micro-batches come in their order."""

    def __init__(self, inner: Any, noted: deque[Request]) -> None:
        self._inner, self._noted = inner, noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def stream(self, pipeline: Any, requests: Iterable[Request], *rest: Any) -> Iterator[MicroBatch]:
        """Yield the inner loader's micro-batches."""

        def noting() -> Iterator[Request]:
            for request in requests:
                self._noted.append(request)
                yield request

        return self._inner.stream(pipeline, noting(), *rest)

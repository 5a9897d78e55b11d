"""An average of the weights over the updates, evaluated beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from drivetrain.lazy import torch
from drivetrain.spec import Part, Share


class Ema(Part):
    """ema=none: no average is kept."""

    active = False

    def start(self, model: torch.nn.Module) -> None:
        """Begin from the model's weights."""

    def update(self) -> None:
        """Take in the weights after a real update."""

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The averaged weights stand in the model; the raw ones come back, on an exception too."""
        yield

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take `state_dict()` back."""


class Average(Ema):
    """Exponential moving average: avg ← decay·avg + (1−decay)·weights, after each real update.

    Float buffers (BatchNorm's statistics) are averaged too or copied, integer ones copied. With `warmup` the decay
    is min(decay, (1+n)/(10+n)), as in TensorFlow's ExponentialMovingAverage, so that early weights are soon forgotten.
    """

    active = True

    def __init__(self, decay: Share = 0.999, warmup: bool = True, buffers: Literal["average", "copy"] = "average") -> None:
        self.decay, self.warmup, self.buffers = decay, warmup, buffers

    def start(self, model: torch.nn.Module) -> None:
        averaged: dict[str, torch.Tensor] = dict(model.named_parameters())
        copied: dict[str, torch.Tensor] = {}
        for name, buffer in model.named_buffers():
            average = buffer.is_floating_point() and self.buffers == "average"
            (averaged if average else copied)[name] = buffer
        self._names = list(averaged) + list(copied)
        self._live = [t.detach() for t in averaged.values()]
        self._live_copied = [t.detach() for t in copied.values()]
        self._mean = [t.clone() for t in self._live]
        self._copied = [t.clone() for t in self._live_copied]
        self._updates = 0

    def update(self) -> None:
        self._updates += 1
        n = self._updates
        decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
        torch._foreach_lerp_(self._mean, self._live, 1.0 - decay)  # detached: no graph is kept
        if self._copied:
            torch._foreach_copy_(self._copied, self._live_copied)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        with torch.no_grad():
            live, mean = self._live + self._live_copied, self._mean + self._copied
            held = [t.clone() for t in live]
            torch._foreach_copy_(live, mean)
            torch._foreach_copy_(mean, held)

    def state_dict(self) -> dict[str, Any]:
        tensors = dict(zip(self._names, self._mean + self._copied, strict=True))
        return {"updates": self._updates, "tensors": tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._updates = state["updates"]
        for name, tensor in zip(self._names, self._mean + self._copied, strict=True):
            tensor.copy_(state["tensors"][name])

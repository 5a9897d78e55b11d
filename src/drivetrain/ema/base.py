"""A moving average of the weights, which is evaluated in addition to the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal

from drivetrain.core import groups
from drivetrain.core.lazy import torch
from drivetrain.core.option import BuildContext, Effect, Option, Share
from drivetrain.core.typed import StateDict

# Relative widths of power-function averages: of one update in a thousand, and nearly the plain mean of a run's (1 / √12 = 0.289).
NARROWEST, BELOW = 0.001, 0.28
STATISTICS = ("running_mean", "running_var")  # the buffers that are means over batches, as torch's norms name them


class Ema(Option, groups.Ema):
    """ema=none: no average is kept."""

    stage_option: ClassVar[bool] = True
    stage_keys: ClassVar[tuple[str, ...]] = ("*",)
    effect: ClassVar[Effect] = "exact"
    started = True  # whether there is an average yet: until then it is the weights themselves
    stale = False  # whether all ranks have to complete the average before it is used

    def update(self) -> None:
        """Add the current weights to the average, after an update that was not skipped."""

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Set the model to the averaged weights. On exit, also after an exception, it has its own weights again."""
        yield

    def state_dict(self) -> StateDict:
        """The state for a resumed run."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Load `state_dict()`."""


class Kept(Ema):
    """The base of what keeps one average. A subclass says in `update` when it moves, and by how much.

    The running statistics of norms are averaged too, or copied; other buffers are copied: a mask of -inf, the vectors of a
    spectral norm or a counter have no mean. Buffers that are not saved with the weights, such as tables of positions, are the
    model's own. The average of 16-bit weights is float32, since in 16 bits small changes would be rounded away.
    """

    effect = "changes"
    changes = "an average of the weights is evaluated too; the weights train as before"
    active = True
    buffers = "average"

    def setup(self, context: BuildContext) -> None:
        """Start the average from the model's weights."""
        model = context.model
        averaged: dict[str, torch.Tensor] = dict(model.named_parameters())
        copied: dict[str, torch.Tensor] = {}
        saved = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name not in saved:
                continue
            average = name.rpartition(".")[2] in STATISTICS and self.buffers == "average"
            (averaged if average else copied)[name] = buffer
        self._names, self._phases = list(averaged) + list(copied), context.phases
        first = {id(p): name for name, p in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        # Further names of a parameter that has several, such as a tied embedding, and its first one.
        self._tied = {name: first[id(p)] for name, p in every if first[id(p)] != name}
        self._live = [t.detach() for t in averaged.values()]
        self._live_copied = [t.detach() for t in copied.values()]
        self._mean = [t.to(torch.promote_types(t.dtype, torch.float32), copy=True) for t in self._live]
        self._copied = [t.clone() for t in self._live_copied]
        self._widened = any(mean.dtype != t.dtype for mean, t in zip(self._mean, self._live, strict=True))
        self._updates = 0

    def update(self) -> None:
        self._updates += 1

    def _move(self, mean: list[torch.Tensor], share: float, live: list[torch.Tensor] | None = None) -> None:
        """Move an average towards the weights, or those of them in `live`: by this share of the way."""
        live = self._live if live is None else live  # detached, so that no graph is kept
        if self._widened:
            live = [t.to(m.dtype) for t, m in zip(live, mean, strict=True)]
        torch._foreach_lerp_(mean, live, share)

    def _copy_buffers(self) -> None:
        """Copy the buffers that are not averaged."""
        if self._copied:
            torch._foreach_copy_(self._copied, self._live_copied)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        live = self._live + self._live_copied
        held = [t.clone() for t in live]
        torch._foreach_copy_(live, self._mean + self._copied)
        try:
            yield
        finally:
            torch._foreach_copy_(live, held)

    def state_dict(self) -> StateDict:
        tensors = dict(zip(self._names, self._mean + self._copied, strict=True))
        return {"updates": self._updates, "tensors": tensors, "tied": dict(self._tied)}

    def load_state_dict(self, state: StateDict) -> None:
        if not state:  # of a checkpoint without an average: it starts from the weights that were loaded
            torch._foreach_copy_(self._mean + self._copied, self._live + self._live_copied)
            return
        self._updates = state["updates"]
        for name, tensor in zip(self._names, self._mean + self._copied, strict=True):
            tensor.copy_(state["tensors"][name])


class Average(Kept):
    """Exponential moving average: average ← decay · average + (1 - decay) · weights, after each update that was not skipped.

    With `warmup` the decay after n updates is min(decay, (1 + n) / (10 + n)), as in TensorFlow's ExponentialMovingAverage, so
    that early weights are soon forgotten.
    """

    effect = "changes"

    def __init__(self, decay: Share = 0.999, warmup: bool = True, buffers: Literal["average", "copy"] = "average") -> None:
        self.decay, self.warmup, self.buffers = decay, warmup, buffers

    def update(self) -> None:
        super().update()
        n = self._updates
        decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
        resting = {p.data_ptr() for phase in self._phases if not phase.made for p in phase.parameters}
        if resting:  # the average of what this update has left alone stays too
            rows = [(m, t) for m, t in zip(self._mean, self._live, strict=True) if t.data_ptr() not in resting]
            self._move([m for m, _ in rows], 1.0 - decay, [t for _, t in rows])
        else:
            self._move(self._mean, 1.0 - decay)
        self._copy_buffers()

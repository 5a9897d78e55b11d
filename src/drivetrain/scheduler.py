"""Learning-rate schedules: pure functions of the update number, so nothing of them needs saving.

`factor(t)` gives the multiple of the base learning rate at share t in [0, 1] of the run after warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from drivetrain.lazy import torch
from drivetrain.spec import NonNegative, Part, Positive, Run, Share


class Scheduler(Part):
    """scheduler=constant: the base learning rate, after a linear warm-up if there is one.

    `warmup` is a share of the run if below 1, else a number of updates; it rises from `warmup_start` × lr.
    """

    def __init__(self, warmup: NonNegative = 0.0, warmup_start: Share = 0.0) -> None:
        self.warmup, self.warmup_start = warmup, warmup_start

    def check(self, run: Run) -> Iterator[str]:
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            yield f"scheduler.warmup={self.warmup} is neither a share below 1 nor a whole number of updates"

    def start(self, optimizer: torch.optim.Optimizer, updates: int) -> None:
        """Bind to an optimizer for a run of `updates` updates."""
        self.optimizer, self.updates = optimizer, updates
        self._base = [group["lr"] for group in optimizer.param_groups]
        self._warmup = round(self.warmup * updates) if self.warmup < 1 else int(self.warmup)

    def step(self, update: int) -> None:
        """Set the learning rate for the update number `update`, from 0."""
        factor = self.multiple(update)
        for group, base in zip(self.optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * factor

    def multiple(self, update: int) -> float:
        """The multiple of the base learning rate that update number `update` is made with."""
        if update < self._warmup:
            return self.warmup_start + (1 - self.warmup_start) * (update + 1) / (self._warmup + 1)
        return self.factor(min(1.0, (update - self._warmup) / max(1, self.updates - self._warmup)))

    def factor(self, t: float) -> float:
        """The curve after warm-up."""
        return 1.0


class Cosine(Scheduler):
    """Half a cosine down to `final` × lr (Loshchilov & Hutter 2017; torch's CosineAnnealingLR)."""

    def __init__(self, warmup: NonNegative = 0.0, warmup_start: Share = 0.0, final: Share = 0.0) -> None:
        super().__init__(warmup, warmup_start)
        self.final = final

    def factor(self, t: float) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * t)) / 2


class OneCycle(Scheduler):
    """1cycle (Smith & Topin 2018; torch's OneCycleLR): up from lr / `div` to lr in `warmup`, then to lr / `div` / `final_div`."""

    def __init__(
        self,
        warmup: NonNegative = 0.3,
        div: Positive = 25.0,
        final_div: Positive = 1e4,
        anneal: Literal["cos", "linear"] = "cos",
    ) -> None:
        super().__init__(warmup)
        self.div, self.final_div, self.anneal = div, final_div, anneal

    def multiple(self, update: int) -> float:
        low, end = 1 / self.div, 1 / (self.div * self.final_div)
        peak = (self.warmup * self.updates if self.warmup < 1 else self.warmup) - 1  # torch's phase ends, not rounded
        if update <= peak:
            return self._between(low, 1.0, update / peak if peak else 1.0)
        return self._between(1.0, end, min(1.0, (update - peak) / (self.updates - 1 - peak)) if self.updates - 1 > peak else 1.0)

    def _between(self, start: float, end: float, t: float) -> float:
        if self.anneal == "linear":
            return start + (end - start) * t
        return end + (start - end) * (1 + math.cos(math.pi * t)) / 2

"""Schedules that rise and fall, and can cycle the momentum against the learning rate."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

from annotated_types import Len

from drivetrain.core.errors import UserError
from drivetrain.core.horizon import Horizon
from drivetrain.core.lazy import torch
from drivetrain.core.option import Length, Momentum, Positive, RunSpec, Share
from drivetrain.scheduler.base import Scheduler, no_length, put, too_long, too_short

Range = Annotated[list[Momentum], Len(2, 2)]  # [low, high]


class Cycling(Scheduler):
    """The base of schedules with a knob `momentum`, [low, high]: high while the rate is low, low at its peak.

    It moves `momentum` of SGD and its kin, `beta1` of Adam and its kin, as torch's cycle_momentum does.
    """

    momentum: list[float] | None

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.momentum is None:
            return
        if self.momentum[0] > self.momentum[1]:
            yield f"scheduler.momentum={self.momentum} is [low, high]: turn it round"
        knobs = inspect.signature(type(run.optimizer)).parameters
        if not {"momentum", "beta1", "betas", "kwargs"} & set(knobs):  # whoever takes kwargs is asked at the start
            yield self._no_momentum(run.named("optimizer"))
        if run.compile.captures_step:
            yield "scheduler.momentum and compile=step exclude each other (its graph keeps the momentum): set it to null"

    def start(self, optimizer: torch.optim.Optimizer, updates: int, ends: Sequence[int] | None = None) -> None:
        super().start(optimizer, updates, ends)
        if self.momentum is not None and not any("betas" in g or "momentum" in g for g in optimizer.param_groups):
            raise UserError(self._no_momentum(type(optimizer).__name__))

    def _no_momentum(self, optimizer: str) -> str:
        return f"scheduler.momentum={self.momentum}, but {optimizer} has neither momentum nor beta1 to cycle: set it to null"

    def step(self, update: int) -> None:
        super().step(update)
        value = self.momentum_at(update)
        if value is None:
            return
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (value, *group["betas"][1:])
            elif "momentum" in group:
                put(group, "momentum", value)

    def momentum_at(self, update: int) -> float | None:
        if self.momentum is None:
            return None
        low, high = self.momentum
        return high - (high - low) * self.rise(update)

    def rise(self, update: int) -> float:
        """How far the momentum is from its high (0) to its low (1)."""
        raise NotImplementedError


class _Phase(NamedTuple):
    """A part of 1cycle, from the end of the one before."""

    end: float  # its last update
    lr: tuple[float, float]  # multiples at its bounds
    rise: tuple[float, float]  # of the momentum, from high (0) to low (1)


class OneCycle(Cycling):
    """1cycle (Smith & Topin 2018; torch's OneCycleLR): up from lr / `div` to lr in `warmup`, then to lr / `div` / `final_div`.

    With `three_phase` the way back to lr / `div` is as long as the way up, and the rest goes on down.
    """

    lengths = ("warmup", "length")

    def __init__(
        self,
        warmup: Length = 0.3,
        div: Positive = 25.0,
        final_div: Positive = 1e4,
        anneal: Literal["cos", "linear"] = "cos",
        three_phase: bool = False,
        momentum: Range | None = None,
        length: Length | None = None,
    ) -> None:
        super().__init__(warmup)
        self.div, self.final_div, self.anneal, self.three_phase = div, final_div, anneal, three_phase
        self.momentum, self.length = momentum, length

    def rules(self, over: Horizon) -> Iterator[str]:
        yield from too_short(self.length, self.warmup, over)
        end = over.updates if self.length is None else over.of(self.length)
        if self.three_phase and 2 * over.of(self.warmup) > end:
            yield (
                f"scheduler.three_phase goes up and back in twice scheduler.warmup={self.warmup}, more than the cycle's "
                f"{end:.0f} updates: set scheduler.warmup below half of it"
            )

    def advice(self, over: Horizon, run: RunSpec) -> Iterator[str]:
        yield from super().advice(over, run)
        yield from too_long(self.length, over)

    def lay(self, over: Horizon) -> None:
        super().lay(over)
        peak = over.of(self.warmup) - 1  # torch's phases end so, not rounded
        end = (over.updates if self.length is None else round(over.of(self.length))) - 1
        start, bottom = 1 / self.div, 1 / (self.div * self.final_div)
        up, down = _Phase(peak, (start, 1.0), (0.0, 1.0)), _Phase(end, (1.0, bottom), (1.0, 0.0))
        back, out = _Phase(2 * peak, (1.0, start), (1.0, 0.0)), _Phase(end, (start, bottom), (0.0, 0.0))
        self._phases = [up, back, out] if self.three_phase else [up, down]

    def multiple(self, update: int) -> float:
        phase, t = self._phase(update)
        return self._between(*phase.lr, t)

    def rise(self, update: int) -> float:
        phase, t = self._phase(update)
        return self._between(*phase.rise, t)

    def _phase(self, update: int) -> tuple[_Phase, float]:
        """The phase an update is in and its share of the way through it."""
        begin = 0.0
        for phase in self._phases:
            if update <= phase.end:
                break
            begin = phase.end
        length = phase.end - begin
        return phase, min(1.0, (update - begin) / length) if length > 0 else 1.0

    def _between(self, start: float, end: float, t: float) -> float:
        if self.anneal == "linear":
            return start + (end - start) * t
        return end + (start - end) * (1 + math.cos(math.pi * t)) / 2


class Cyclic(Cycling):
    """Triangles between `low` × lr and lr for as long as the run goes (Smith 2017; torch's CyclicLR)."""

    lengths = ("warmup", "up", "down")

    def __init__(
        self,
        low: Share = 0.1,
        up: Length = 0.1,
        down: Length | None = None,
        mode: Literal["triangular", "triangular2", "exp_range"] = "triangular",
        gamma: Share | None = None,
        momentum: Range | None = None,
        warmup: Length = 0.0,
        warmup_start: Share = 0.0,
    ) -> None:
        super().__init__(warmup, warmup_start)
        self.low, self.up, self.down, self.mode, self.gamma, self.momentum = low, up, down, mode, gamma, momentum

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.mode == "exp_range" and self.gamma is None:
            yield "scheduler.mode=exp_range shrinks the height by scheduler.gamma at each update: set it, such as 0.999"
        if self.mode != "exp_range" and self.gamma is not None:
            yield f"scheduler.gamma={self.gamma} is exp_range's, not scheduler.mode={self.mode}'s: set it to null"

    def rules(self, over: Horizon) -> Iterator[str]:
        yield from no_length("up", self.up, over)
        if self.down is not None:
            yield from no_length("down", self.down, over)

    def advice(self, over: Horizon, run: RunSpec) -> Iterator[str]:
        yield from super().advice(over, run)
        cycle = over.of(self.up) + over.of(self.up if self.down is None else self.down)
        if cycle > over.updates:
            yield f"scheduler.up={self.up}: one cycle is {cycle:.0f} updates and the run has {over.updates}: it does not end"

    def lay(self, over: Horizon) -> None:
        super().lay(over)
        self._up = max(1, round(over.of(self.up)))
        self._down = self._up if self.down is None else max(1, round(over.of(self.down)))

    def curve(self, since: int) -> float:
        return self.low + (1 - self.low) * self._height(since)

    def rise(self, update: int) -> float:
        return self._height(max(0, update - self._warmup))

    def _height(self, since: int) -> float:
        """Where the triangle is between low (0) and the first peak (1)."""
        cycle, at = divmod(since, self._up + self._down)
        height = at / self._up if at <= self._up else 1 - (at - self._up) / self._down
        return height * {"triangular": 1.0, "triangular2": 0.5**cycle, "exp_range": (self.gamma or 1.0) ** since}[self.mode]

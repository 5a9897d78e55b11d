"""Schedules that rise and fall, with a momentum that may go the other way."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

from annotated_types import Len

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options.horizon import Horizon
from drivetrain.core.options.option import Length, Momentum, Positive, RunSpec, Share
from drivetrain.scheduler.base import (
    Scheduler,
    early_end_problem,
    late_end_advice,
    set_group_value,
    zero_length_problem,
)

Range = Annotated[list[Momentum], Len(2, 2)]  # [low, high]


class MomentumCycling(Scheduler):
    """The base of schedules with an argument `momentum`, [low, high]: high while the learning rate is low, low at its peak.

    It sets `momentum` of optimizers such as SGD and `beta1` of those such as Adam, as torch's cycle_momentum does.
    """

    momentum: list[float] | None

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.momentum is None:
            return
        if self.momentum[0] > self.momentum[1]:
            yield f"scheduler.momentum={self.momentum} must be [low, high]: exchange the two"
        settings = inspect.signature(type(run.optimizer)).parameters
        if not {"momentum", "beta1", "betas", "kwargs"} & set(settings):  # with kwargs, `bind` checks the optimizer itself
            yield self._no_momentum(run.named("optimizer"))
        if run.compile.captures_step:
            yield "scheduler.momentum and compile=step exclude each other (its graph keeps the momentum): set it to null"

    def bind(self, optimizer: torch.optim.Optimizer, updates: int, ends: Sequence[int] | None = None) -> None:
        super().bind(optimizer, updates, ends)
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
                set_group_value(group, "momentum", value)

    def momentum_at(self, update: int) -> float | None:
        if self.momentum is None:
            return None
        low, high = self.momentum
        return high - (high - low) * self.momentum_drop(update)

    def momentum_drop(self, update: int) -> float:
        """Position of the momentum for update number `update`: 0 at its high, 1 at its low."""
        raise self.unwritten("momentum_drop")


class _Phase(NamedTuple):
    """A part of 1cycle. It begins at the end of the part before."""

    end: float  # its last update
    lr: tuple[float, float]  # lr_factor at its bounds
    momentum_drop: tuple[float, float]  # at its bounds


class OneCycle(MomentumCycling):
    """1cycle (Smith & Topin 2018; torch's OneCycleLR): up from lr / `div` to lr in `warmup`, then to lr / `div` / `final_div`.

    With `three_phase` it returns to lr / `div` in as many updates as it rose, and falls further in the rest.
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

    def horizon_problems(self, horizon: Horizon) -> Iterator[str]:
        yield from early_end_problem(self.length, self.warmup, horizon)
        end = horizon.updates if self.length is None else horizon.in_updates(self.length)
        if self.three_phase and 2 * horizon.in_updates(self.warmup) > end:
            yield (
                f"scheduler.three_phase goes up and back in twice scheduler.warmup={self.warmup}, more than the cycle's "
                f"{end:.0f} updates: set scheduler.warmup below half of it"
            )

    def horizon_advice(self, horizon: Horizon, run: RunSpec) -> Iterator[str]:
        yield from super().horizon_advice(horizon, run)
        yield from late_end_advice(self.length, horizon)

    def set_horizon(self, horizon: Horizon) -> None:
        super().set_horizon(horizon)
        peak = horizon.in_updates(self.warmup) - 1  # as in torch, not rounded
        end = (horizon.updates if self.length is None else round(horizon.in_updates(self.length))) - 1
        start, bottom = 1 / self.div, 1 / (self.div * self.final_div)
        up, down = _Phase(peak, (start, 1.0), (0.0, 1.0)), _Phase(end, (1.0, bottom), (1.0, 0.0))
        back, out = _Phase(2 * peak, (1.0, start), (1.0, 0.0)), _Phase(end, (start, bottom), (0.0, 0.0))
        self._phases = [up, back, out] if self.three_phase else [up, down]

    def lr_factor(self, update: int) -> float:
        phase, t = self._phase(update)
        return self._between(*phase.lr, t)

    def momentum_drop(self, update: int) -> float:
        phase, t = self._phase(update)
        return self._between(*phase.momentum_drop, t)

    def _phase(self, update: int) -> tuple[_Phase, float]:
        """The phase of an update, and the completed share of the phase, 0 to 1."""
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


class Cyclic(MomentumCycling):
    """Triangles between `low` × lr and lr until the end of the run (Smith 2017; torch's CyclicLR)."""

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
            yield "scheduler.mode=exp_range multiplies the height by scheduler.gamma at each update: set it, to 0.999 for example"
        if self.mode != "exp_range" and self.gamma is not None:
            yield f"scheduler.gamma={self.gamma} is exp_range's, not scheduler.mode={self.mode}'s: set it to null"

    def horizon_problems(self, horizon: Horizon) -> Iterator[str]:
        yield from zero_length_problem("up", self.up, horizon)
        if self.down is not None:
            yield from zero_length_problem("down", self.down, horizon)

    def horizon_advice(self, horizon: Horizon, run: RunSpec) -> Iterator[str]:
        yield from super().horizon_advice(horizon, run)
        cycle = horizon.in_updates(self.up) + horizon.in_updates(self.up if self.down is None else self.down)
        if cycle > horizon.updates:
            yield f"scheduler.up={self.up}: one cycle is {cycle:.0f} updates and the run has {horizon.updates}: it does not end"

    def set_horizon(self, horizon: Horizon) -> None:
        super().set_horizon(horizon)
        self._up = max(1, round(horizon.in_updates(self.up)))
        self._down = self._up if self.down is None else max(1, round(horizon.in_updates(self.down)))

    def factor_after_warmup(self, since: int) -> float:
        return self.low + (1 - self.low) * self._height(since)

    def momentum_drop(self, update: int) -> float:
        return self._height(max(0, update - self._warmup))

    def _height(self, since: int) -> float:
        """The height of the triangle, `since` updates after the warm-up: 0 at `low`, 1 at the first peak."""
        cycle, at = divmod(since, self._up + self._down)
        height = at / self._up if at <= self._up else 1 - (at - self._up) / self._down
        return height * {"triangular": 1.0, "triangular2": 0.5**cycle, "exp_range": (self.gamma or 1.0) ** since}[self.mode]

"""Schedules over the update number: falling ones, rising and falling ones, and one that follows the evaluations."""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge, Le, Len, MinLen

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options.allowed import FigureName
from drivetrain.core.options.horizon import Horizon
from drivetrain.core.options.option import CountOrZero, Length, Momentum, NonNegative, Positive, RunSpec, Share
from drivetrain.core.options.selection import evaluated, problems
from drivetrain.core.typed import StateDict
from drivetrain.scheduler.base import (
    Scheduler,
    beside_run,
    early_end_problem,
    late_end_advice,
    set_group_value,
    zero_length_problem,
)

MAX_LOG = 500.0  # of a product of factors that a float can hold


class Decay(Scheduler):
    """The base of curves from lr to `final` × lr. They end after `length`, warm-up included, or with the run; then lr stays."""

    lengths = ("warmup", "length")

    def __init__(self, warmup: Length = 0.0, warmup_start: Share = 0.0, final: Share = 0.0, length: Length | None = None) -> None:
        super().__init__(warmup, warmup_start)
        self.final, self.length = final, length

    def horizon_problems(self, horizon: Horizon) -> Iterator[str]:
        yield from early_end_problem(self.length, self.warmup, horizon)

    def horizon_advice(self, horizon: Horizon, run: RunSpec) -> Iterator[str]:
        yield from super().horizon_advice(horizon, run)
        yield from late_end_advice(self.length, horizon)

    def set_horizon(self, horizon: Horizon) -> None:
        super().set_horizon(horizon)
        end = horizon.updates if self.length is None else round(horizon.in_updates(self.length))
        self._rest = max(1, end - self._warmup)

    def factor_after_warmup(self, since: int) -> float:
        return self.final + (1 - self.final) * self.decay_curve(min(1.0, since / self._rest))

    def decay_curve(self, progress: float) -> float:
        """The curve, from 1 at progress 0 to 0 at progress 1."""
        raise self.unwritten("decay_curve")


class Linear(Decay):
    """A straight line (torch's LinearLR)."""

    def decay_curve(self, progress: float) -> float:
        return 1 - progress


class Poly(Decay):
    """A power of a straight line (Chen et al. 2017, DeepLab; torch's PolynomialLR, with timm's floor)."""

    def __init__(
        self,
        warmup: Length = 0.0,
        warmup_start: Share = 0.0,
        final: Share = 0.0,
        power: Positive = 0.9,
        length: Length | None = None,
    ) -> None:
        super().__init__(warmup, warmup_start, final, length)
        self.power = power

    def decay_curve(self, progress: float) -> float:
        return float((1 - progress) ** self.power)


class Cosine(Decay):
    """Half a cosine, or `cycles` of them with restarts (SGDR, Loshchilov & Hutter 2017; torch's CosineAnnealingLR and
    CosineAnnealingWarmRestarts, timm's CosineLRScheduler).

    Each cycle is `cycle_mult` times as long as the one before and starts at `cycle_decay` times its start. Together the
    cycles fill the run, so that it never ends in the middle of one.
    """

    def __init__(
        self,
        warmup: Length = 0.0,
        warmup_start: Share = 0.0,
        final: Share = 0.0,
        cycles: Annotated[int, Ge(1), Le(10_000)] = 1,
        cycle_mult: Positive = 1.0,
        cycle_decay: Positive = 1.0,
        length: Length | None = None,
    ) -> None:
        super().__init__(warmup, warmup_start, final, length)
        self.cycles, self.cycle_mult, self.cycle_decay = cycles, cycle_mult, cycle_decay

    @cached_property
    def _ends(self) -> list[float]:
        """The end of each cycle, in units of the first one's length."""
        return list(accumulate(self.cycle_mult**i for i in range(self.cycles)))

    def validate(self, run: RunSpec) -> Iterator[str]:
        factors = {"cycle_mult": self.cycle_mult, "cycle_decay": self.cycle_decay}
        beyond = [setting for setting, factor in factors.items() if self.cycles * abs(math.log(factor)) > MAX_LOG]
        for setting in beyond:
            yield f"scheduler.{setting}={factors[setting]:g} to the power of scheduler.cycles={self.cycles} is none: lower one"
        yield from () if beyond else super().validate(run)

    def horizon_problems(self, horizon: Horizon) -> Iterator[str]:
        yield from super().horizon_problems(horizon)
        end = horizon.updates if self.length is None else horizon.in_updates(self.length)
        shortest = (end - horizon.in_updates(self.warmup)) * min(1.0, self.cycle_mult ** (self.cycles - 1)) / self._ends[-1]
        if self.cycles > 1 and shortest < 1:
            yield f"scheduler.cycles={self.cycles} makes a cycle shorter than one update: lower it, or scheduler.cycle_mult"

    def factor_after_warmup(self, since: int) -> float:
        # Multiplied before it is divided, so that a restart is at its exact update, without a rounding error.
        at = min(since, self._rest) * self._ends[-1] / self._rest
        cycle = next((i for i, end in enumerate(self._ends) if at < end), self.cycles - 1)
        begin = self._ends[cycle - 1] if cycle else 0.0
        t = (at - begin) / (self._ends[cycle] - begin)
        return self.final + (self.cycle_decay**cycle - self.final) * (1 + math.cos(math.pi * t)) / 2


class Exponential(Scheduler):
    """Multiplied by `gamma` over each `every`, smoothly at each update (torch's ExponentialLR)."""

    lengths = ("warmup", "every")

    def __init__(self, gamma: Share = 0.9, every: Length = "1ep", warmup: Length = 0.0, warmup_start: Share = 0.0) -> None:
        super().__init__(warmup, warmup_start)
        self.gamma, self.every = gamma, every

    def horizon_problems(self, horizon: Horizon) -> Iterator[str]:
        yield from zero_length_problem("every", self.every, horizon)

    def horizon_advice(self, horizon: Horizon, run: RunSpec) -> Iterator[str]:
        yield from super().horizon_advice(horizon, run)
        end = self.gamma ** (horizon.updates / horizon.in_updates(self.every))
        if end < 1e-6:
            yield f"scheduler.gamma={self.gamma} every {self.every} ends the run at {end:.0e} of the learning rate: raise either"

    def set_horizon(self, horizon: Horizon) -> None:
        super().set_horizon(horizon)
        self._every = horizon.in_updates(self.every)

    def factor_after_warmup(self, since: int) -> float:
        return float(self.gamma ** (since / self._every))


class Wsd(Scheduler):
    """Warm-up, stable, decay: full learning rate until the last `decay` (Hu et al. 2024, MiniCPM; sqrt: Hägele et al. 2024)."""

    lengths = ("warmup", "decay")

    def __init__(
        self,
        warmup: Length = 0.05,
        warmup_start: Share = 0.0,
        decay: Length = 0.2,
        shape: Literal["linear", "cosine", "sqrt", "exponential"] = "linear",
        final: Share = 0.0,
    ) -> None:
        super().__init__(warmup, warmup_start)
        self.decay, self.shape, self.final = decay, shape, final

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.shape == "exponential" and self.final == 0:
            yield "scheduler.shape=exponential never reaches scheduler.final=0: set scheduler.final above 0, such as 0.01"

    def horizon_problems(self, horizon: Horizon) -> Iterator[str]:
        warmup, decay = horizon.in_updates(self.warmup), horizon.in_updates_at_end(self.decay)
        if warmup + decay > horizon.updates:
            yield (
                f"scheduler.warmup={self.warmup} and scheduler.decay={self.decay} are {warmup:.0f} + {decay:.0f} updates, "
                f"more than the run's {horizon.updates}: shorten them or train longer (epochs, updates)"
            )

    def set_horizon(self, horizon: Horizon) -> None:
        super().set_horizon(horizon)
        begin = max(self._warmup, horizon.updates - round(horizon.in_updates_at_end(self.decay)))
        self._stable, self._decay = begin - self._warmup, max(1, horizon.updates - begin)

    def factor_after_warmup(self, since: int) -> float:
        t = min(1.0, max(0, since - self._stable) / self._decay)
        if self.shape == "exponential":
            return float(self.final**t)
        height = {"linear": 1 - t, "cosine": (1 + math.cos(math.pi * t)) / 2, "sqrt": 1 - math.sqrt(t)}[self.shape]
        return self.final + (1 - self.final) * height


class MultiStep(Scheduler):
    """Multiplied by `gamma` at each of the `milestones` (torch's MultiStepLR)."""

    lengths = ("warmup", "milestones")

    def __init__(
        self,
        milestones: Annotated[Sequence[Length], MinLen(1)] = (0.5, 0.75),
        gamma: Share = 0.1,
        warmup: Length = 0.0,
        warmup_start: Share = 0.0,
    ) -> None:
        super().__init__(warmup, warmup_start)
        self.milestones, self.gamma = milestones, gamma

    def horizon_problems(self, horizon: Horizon) -> Iterator[str]:
        if any(b <= a for a, b in pairwise(map(horizon.in_updates, self.milestones))):  # two shares may be rounded to one update
            at = ", ".join(map(str, self._at(horizon)))
            yield f"scheduler.milestones={list(self.milestones)} must increase: they are updates {at} of this run"

    def horizon_advice(self, horizon: Horizon, run: RunSpec) -> Iterator[str]:
        yield from super().horizon_advice(horizon, run)
        for length, at in zip(self.milestones, self._at(horizon), strict=True):
            if at >= horizon.updates:
                yield f"scheduler.milestones: {length} is update {at} and the run ends at {horizon.updates}: it has no effect"

    def set_horizon(self, horizon: Horizon) -> None:
        super().set_horizon(horizon)
        self._milestones = self._at(horizon)

    def _at(self, horizon: Horizon) -> list[int]:
        return [round(horizon.in_updates(m)) for m in self.milestones]

    def factor_after_warmup(self, since: int) -> float:
        return self.gamma ** bisect_right(self._milestones, since + self._warmup)


class StepDecay(Scheduler):
    """Multiplied by `gamma` after each `every` (torch's StepLR)."""

    lengths = ("warmup", "every")

    def __init__(self, every: Length = 0.34, gamma: Share = 0.1, warmup: Length = 0.0, warmup_start: Share = 0.0) -> None:
        super().__init__(warmup, warmup_start)
        self.every, self.gamma = every, gamma

    def horizon_problems(self, horizon: Horizon) -> Iterator[str]:
        yield from zero_length_problem("every", self.every, horizon)

    def horizon_advice(self, horizon: Horizon, run: RunSpec) -> Iterator[str]:
        yield from super().horizon_advice(horizon, run)
        if horizon.in_updates(self.every) >= horizon.updates:
            yield f"{beside_run('every', self.every, horizon)}: the learning rate never falls"

    def set_horizon(self, horizon: Horizon) -> None:
        super().set_horizon(horizon)
        self._every = max(1, round(horizon.in_updates(self.every)))

    def factor_after_warmup(self, since: int) -> float:
        return self.gamma ** ((since + self._warmup) // self._every)


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
    """A part of 1cycle. It begins where the one before ends."""

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
        """The phase that an update is in, and the share of the phase that has passed, 0 to 1."""
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


class Plateau(Scheduler):
    """Multiplied by `factor` when `metric` has not improved for more than `patience` evaluations (torch's ReduceLROnPlateau)."""

    follows_evaluations = True
    plot_note = "it falls when evaluations stop improving, which a plot cannot show"

    def __init__(
        self,
        metric: FigureName = "loss",
        mode: Literal["min", "max"] = "min",
        factor: Momentum = 0.1,
        patience: CountOrZero = 3,
        threshold: NonNegative = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: CountOrZero = 0,
        final: Share = 0.0,
        warmup: Length = 0.0,
        warmup_start: Share = 0.0,
    ) -> None:
        super().__init__(warmup, warmup_start)
        self.metric, self.mode, self.factor, self.patience = metric, mode, factor, patience
        self.threshold, self.threshold_mode, self.cooldown, self.final = threshold, threshold_mode, cooldown, final
        self._lr_factor = 1.0
        self._best: float | None = None
        self._bad = self._cooling = 0  # evaluations without improvement, and left of the cooldown

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        yield from problems(run, "scheduler.metric", self.metric)
        better = evaluated(run).get(self.metric)
        if better is not None and self.mode != better.__name__:
            name = better.__name__
            yield f"scheduler.mode={self.mode}, but the best {self.metric} is the {name}imum: set scheduler.mode={name}"

    def horizon_advice(self, horizon: Horizon, run: RunSpec) -> Iterator[str]:
        yield from super().horizon_advice(horizon, run)
        evaluations = math.ceil(horizon.epochs / run.values["evaluate_every"])
        if evaluations < self.patience + 2:  # the first one is compared with nothing
            yield (
                f"scheduler.patience={self.patience} and {evaluations} evaluations in all: the learning rate can hardly fall; "
                "lower scheduler.patience or evaluate_every, or train longer"
            )

    def factor_after_warmup(self, since: int) -> float:
        return self._lr_factor

    def evaluated(self, metrics: dict[str, float]) -> None:
        value = metrics.get(self.metric, math.nan)
        if self._better(value):
            self._best, self._bad = value, 0
        else:
            self._bad += 1
        if self._cooling:
            self._cooling, self._bad = self._cooling - 1, 0
        if self._bad > self.patience:
            self._lr_factor = max(self.final, self._lr_factor * self.factor)
            self._cooling, self._bad = self.cooldown, 0

    def _better(self, value: float) -> bool:
        if self._best is None:
            return value == value  # not NaN: NaN is never better
        margin = self.threshold * (1.0 if self.threshold_mode == "abs" else self._best)
        return value < self._best - margin if self.mode == "min" else value > self._best + margin

    def state_dict(self) -> StateDict:
        return {"lr_factor": self._lr_factor, "best": self._best, "bad": self._bad, "cooling": self._cooling}

    def load_state_dict(self, state: StateDict) -> None:
        if not state:  # of a checkpoint of another schedule
            return
        self._lr_factor, self._best = state["lr_factor"], state["best"]
        self._bad, self._cooling = state["bad"], state["cooling"]

"""Schedules over the update number: falling ones, and one that follows the evaluations."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Annotated, Literal

from annotated_types import Ge, Le, MinLen

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
    zero_length_problem,
)

MAX_LOG = 500.0  # limit of a product of factors in a float


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


class InverseSqrt(Scheduler):
    """√(timescale / updates) after the warm-up (Vaswani et al. 2017, the "Noam" schedule; transformers' inverse_sqrt).

    The default `timescale` is the warm-up: the whole curve is then min(u / w, √(w / u)) at update u, from 1, where w is the end
    of the warm-up.
    """

    lengths = ("warmup", "timescale")

    def __init__(self, warmup: Length = 0.05, warmup_start: Share = 0.0, timescale: Length | None = None) -> None:
        super().__init__(warmup, warmup_start)
        self.timescale = timescale

    def horizon_problems(self, horizon: Horizon) -> Iterator[str]:
        if self.timescale is not None:
            yield from zero_length_problem("timescale", self.timescale, horizon)

    def set_horizon(self, horizon: Horizon) -> None:
        super().set_horizon(horizon)
        self._timescale = self._warmup + 1 if self.timescale is None else horizon.in_updates(self.timescale)

    def factor_after_warmup(self, since: int) -> float:
        return math.sqrt(self._timescale / (self._timescale + since))


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
        self._bad = self._cooling = 0  # evaluations without improvement, and those left in the cooldown

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

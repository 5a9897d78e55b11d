"""A schedule that depends on the evaluations, and therefore has state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from drivetrain.core.allowed import FigureName
from drivetrain.core.horizon import Horizon
from drivetrain.core.option import CountOrZero, Length, Momentum, NonNegative, RunSpec, Share
from drivetrain.core.selection import evaluated, problems
from drivetrain.core.typed import StateDict
from drivetrain.scheduler.base import Scheduler


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

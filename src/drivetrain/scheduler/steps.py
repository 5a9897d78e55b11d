"""Schedules that fall in steps. Their lengths count from the start of the run, including the warm-up."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated

from annotated_types import MinLen

from drivetrain.core.horizon import Horizon
from drivetrain.core.option import Length, RunSpec, Share
from drivetrain.scheduler.base import Scheduler, beside_run, zero_length_problem


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


class Step(Scheduler):
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

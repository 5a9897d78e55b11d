"""Schedules that fall in steps. Their lengths count from the start of the run, warm-up included."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated

from annotated_types import MinLen

from drivetrain.core.horizon import Horizon
from drivetrain.core.option import Length, RunSpec, Share
from drivetrain.scheduler.base import Scheduler, no_length


class MultiStep(Scheduler):
    """× `gamma` at each of the `milestones` (torch's MultiStepLR)."""

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

    def rules(self, over: Horizon) -> Iterator[str]:
        if any(b <= a for a, b in pairwise(map(over.of, self.milestones))):  # shares may round to one update
            at = ", ".join(map(str, self._at(over)))
            yield f"scheduler.milestones={list(self.milestones)} must increase: they are updates {at} of this run"

    def advice(self, over: Horizon, run: RunSpec) -> Iterator[str]:
        yield from super().advice(over, run)
        for length, at in zip(self.milestones, self._at(over), strict=True):
            if at >= over.updates:
                yield f"scheduler.milestones: {length} is update {at} and the run ends at {over.updates}: it has no effect"

    def lay(self, over: Horizon) -> None:
        super().lay(over)
        self._milestones = self._at(over)

    def _at(self, over: Horizon) -> list[int]:
        return [round(over.of(m)) for m in self.milestones]

    def curve(self, since: int) -> float:
        return self.gamma ** bisect_right(self._milestones, since + self._warmup)


class Step(Scheduler):
    """× `gamma` every `every` (torch's StepLR)."""

    lengths = ("warmup", "every")

    def __init__(self, every: Length = 0.34, gamma: Share = 0.1, warmup: Length = 0.0, warmup_start: Share = 0.0) -> None:
        super().__init__(warmup, warmup_start)
        self.every, self.gamma = every, gamma

    def rules(self, over: Horizon) -> Iterator[str]:
        yield from no_length("every", self.every, over)

    def advice(self, over: Horizon, run: RunSpec) -> Iterator[str]:
        yield from super().advice(over, run)
        if over.of(self.every) >= over.updates:
            yield (
                f"scheduler.every={self.every} is {over.of(self.every):.0f} updates and the run has {over.updates}: "
                "the learning rate never falls"
            )

    def lay(self, over: Horizon) -> None:
        super().lay(over)
        self._every = max(1, round(over.of(self.every)))

    def curve(self, since: int) -> float:
        return self.gamma ** ((since + self._warmup) // self._every)

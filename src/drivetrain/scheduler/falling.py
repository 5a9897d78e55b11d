"""Schedules that fall towards the end of the run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Literal

from drivetrain.core.horizon import Horizon
from drivetrain.core.option import Count, Length, Positive, RunSpec, Share
from drivetrain.scheduler.base import Scheduler, no_length, too_long, too_short


class Falling(Scheduler):
    """The base of curves from lr to `final` × lr over the run, or over `length`, warm-up included; then `final` holds."""

    lengths = ("warmup", "length")

    def __init__(self, warmup: Length, warmup_start: Share, final: Share, length: Length | None) -> None:
        super().__init__(warmup, warmup_start)
        self.final, self.length = final, length

    def rules(self, over: Horizon) -> Iterator[str]:
        yield from too_short(self.length, self.warmup, over)

    def advice(self, over: Horizon, run: RunSpec) -> Iterator[str]:
        yield from super().advice(over, run)
        yield from too_long(self.length, over)

    def lay(self, over: Horizon) -> None:
        super().lay(over)
        end = over.updates if self.length is None else round(over.of(self.length))
        self._rest = max(1, end - self._warmup)

    def curve(self, since: int) -> float:
        return self.final + (1 - self.final) * self.height(min(1.0, since / self._rest))

    def height(self, t: float) -> float:
        """The curve from 1 at t = 0 to 0 at t = 1."""
        raise NotImplementedError


class Linear(Falling):
    """A straight line down (torch's LinearLR)."""

    def __init__(self, warmup: Length = 0.0, warmup_start: Share = 0.0, final: Share = 0.0, length: Length | None = None) -> None:
        super().__init__(warmup, warmup_start, final, length)

    def height(self, t: float) -> float:
        return 1 - t


class Poly(Falling):
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

    def height(self, t: float) -> float:
        return (1 - t) ** self.power


class Cosine(Falling):
    """Half a cosine down, or `cycles` of them with restarts (SGDR, Loshchilov & Hutter 2017; torch's CosineAnnealingLR
    and CosineAnnealingWarmRestarts, timm's CosineLRScheduler).

    Each cycle is `cycle_mult` times as long as the one before and starts at `cycle_decay` times its height; all of them
    together fill the run, so that it never ends in the middle of one.
    """

    def __init__(
        self,
        warmup: Length = 0.0,
        warmup_start: Share = 0.0,
        final: Share = 0.0,
        cycles: Count = 1,
        cycle_mult: Positive = 1.0,
        cycle_decay: Positive = 1.0,
        length: Length | None = None,
    ) -> None:
        super().__init__(warmup, warmup_start, final, length)
        self.cycles, self.cycle_mult, self.cycle_decay = cycles, cycle_mult, cycle_decay
        self._ends = list(accumulate(cycle_mult**i for i in range(cycles)))  # of each cycle, in lengths of the first

    def rules(self, over: Horizon) -> Iterator[str]:
        yield from super().rules(over)
        end = over.updates if self.length is None else over.of(self.length)
        shortest = (end - over.of(self.warmup)) * min(1.0, self.cycle_mult ** (self.cycles - 1)) / self._ends[-1]
        if self.cycles > 1 and shortest < 1:
            yield f"scheduler.cycles={self.cycles} leaves less than one update to a cycle: lower it, or scheduler.cycle_mult"

    def curve(self, since: int) -> float:
        # The product comes before the division, so that a restart falls on its update and not a rounding beside it.
        at = min(since, self._rest) * self._ends[-1] / self._rest
        cycle = next((i for i, end in enumerate(self._ends) if at < end), self.cycles - 1)
        begin = self._ends[cycle - 1] if cycle else 0.0
        t = (at - begin) / (self._ends[cycle] - begin)
        return self.final + (self.cycle_decay**cycle - self.final) * (1 + math.cos(math.pi * t)) / 2


class Exponential(Scheduler):
    """× `gamma` every `every`, smoothly (torch's ExponentialLR)."""

    lengths = ("warmup", "every")

    def __init__(self, gamma: Share = 0.9, every: Length = "1ep", warmup: Length = 0.0, warmup_start: Share = 0.0) -> None:
        super().__init__(warmup, warmup_start)
        self.gamma, self.every = gamma, every

    def rules(self, over: Horizon) -> Iterator[str]:
        yield from no_length("every", self.every, over)

    def advice(self, over: Horizon, run: RunSpec) -> Iterator[str]:
        yield from super().advice(over, run)
        end = self.gamma ** (over.updates / over.of(self.every))
        if end < 1e-6:
            yield f"scheduler.gamma={self.gamma} every {self.every} ends the run at {end:.0e} of the learning rate: raise one"

    def lay(self, over: Horizon) -> None:
        super().lay(over)
        self._every = over.of(self.every)

    def curve(self, since: int) -> float:
        return self.gamma ** (since / self._every)


class Wsd(Scheduler):
    """Warm-up, stable, decay: full rate until the last `decay` (Hu et al. 2024, MiniCPM; sqrt: Hägele et al. 2024)."""

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
            yield "scheduler.shape=exponential never gets to scheduler.final=0: set scheduler.final above 0, such as 0.01"

    def rules(self, over: Horizon) -> Iterator[str]:
        warmup, decay = over.of(self.warmup), over.of_end(self.decay)
        if warmup + decay > over.updates:
            yield (
                f"scheduler.warmup={self.warmup} and scheduler.decay={self.decay} are {warmup:.0f} + {decay:.0f} updates, "
                f"more than the run's {over.updates}: shorten them or train longer (epochs, updates)"
            )

    def lay(self, over: Horizon) -> None:
        super().lay(over)
        begin = max(self._warmup, over.updates - round(over.of_end(self.decay)))
        self._stable, self._decay = begin - self._warmup, max(1, over.updates - begin)

    def curve(self, since: int) -> float:
        t = min(1.0, max(0, since - self._stable) / self._decay)
        if self.shape == "exponential":
            return self.final**t
        height = {"linear": 1 - t, "cosine": (1 + math.cos(math.pi * t)) / 2, "sqrt": 1 - math.sqrt(t)}[self.shape]
        return self.final + (1 - self.final) * height

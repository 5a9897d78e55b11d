"""The learning-rate range test: the loss while the learning rate rises."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from drivetrain.core.step.microbatch import one_update
from drivetrain.launch.trials import make_update
from drivetrain.ui.pages import charts

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

LOW, HIGH = 1e-6, 10.0  # the usual rates of all optimizers are between these
SMOOTHING = 4  # averaged losses on each side; a centred mean does not shift the curve, unlike a running mean
MIN_FALL = 0.02  # of the first loss: a smaller fall is noise
DIVERGED = 4.0  # times the first loss


@dataclass
class RangeTest:
    """The learning rate range test (Smith 2015): a few updates, each with a higher rate than the one before, and their losses.

    Its result is advice. It sees only the first updates, from freshly initialized weights, and each rate for one update. The
    best rate of a whole run, with its schedule and warm-up, is often several times higher or lower, and lower for long training
    and noisy batches.
    """

    rates: list[float]
    losses: list[float]
    configured: float

    @cached_property
    def smoothed(self) -> list[float]:
        """The losses, each averaged with its neighbours."""
        windows = [self.losses[max(0, n - SMOOTHING) : n + SMOOTHING + 1] for n in range(len(self.losses))]
        return [statistics.fmean(window) for window in windows]

    @property
    def steepest(self) -> float | None:
        """The rate at which the loss fell fastest on its way to the lowest; None if it never fell."""
        lowest = self.smoothed.index(min(self.smoothed))
        falls = [a - b for a, b in zip(self.smoothed[:lowest], self.smoothed[2 * SMOOTHING : lowest + 1], strict=False)]
        if not falls or self.smoothed[0] - self.smoothed[lowest] < MIN_FALL * self.smoothed[0]:
            return None
        return self.rates[falls.index(max(falls)) + SMOOTHING]

    @property
    def bound(self) -> float | None:
        """A tenth of the rate with the lowest loss, near the highest that trains; None if the loss never fell."""
        return None if self.steepest is None else self.rates[self.smoothed.index(min(self.smoothed))] / 10


def range_test(trainer: Trainer, updates: int) -> RangeTest:
    """Train a built trainer for at most `updates` updates, while the rate rises from LOW to HIGH by a constant factor."""
    import torch

    from drivetrain.scheduler.base import set_group_value  # imports torch

    trainer.model.train()
    trainer.endless()
    groups = trainer.optimizer.param_groups
    base = [float(group["lr"]) for group in groups]
    highest = max(base)
    stream = trainer.read()
    rates: list[float] = []
    losses: list[float] = []
    for number in range(updates):
        rate = LOW * (HIGH / LOW) ** (number / (updates - 1))
        for group, own in zip(groups, base, strict=True):
            set_group_value(group, "lr", rate * own / highest)
        loss = torch.zeros((), device=trainer.device)
        make_update(trainer, one_update(stream), loss)
        if not math.isfinite(float(loss)) or (losses and float(loss) > DIVERGED * losses[0]):
            break
        rates.append(rate)
        losses.append(float(loss))
    return RangeTest(rates, losses, highest)


def chart(tested: RangeTest) -> str:
    """The loss against the rate."""
    marks = [("steepest", tested.steepest), ("lowest / 10", tested.bound), ("configured", tested.configured)]
    curve = charts.ChartLine("loss", list(zip(tested.rates, tested.smoothed, strict=True)))
    named = [(name, rate) for name, rate in marks if rate is not None]
    return charts.curves(
        "Loss, smoothed, over the learning rate", [curve], "learning rate (logarithmic)", log_x=True, marks=named
    )


def advice(tested: RangeTest) -> list[str]:
    """The result in sentences."""
    if tested.steepest is None or tested.bound is None:
        between = f"{LOW:g} and {tested.rates[-1]:.2g}"
        return [f"range test: the loss fell at no rate between {between}: check the data and the loss first"]
    return [
        f"range test: the loss fell fastest at lr {tested.steepest:.2g}; a tenth of the rate with the lowest loss is "
        f"{tested.bound:.2g}; optimizer.lr is {tested.configured:.2g}",
        "this is advice, and nothing was set: the test saw the first updates only, and the best rate of a whole run is often "
        "several times lower or higher; to measure it: drivetrain compare optimizer.lr=… quality=true",
    ]

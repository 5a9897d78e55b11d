"""The learning rate range test (Smith 2015): a few updates, each at a higher rate than the one before.

What it says is advice. It sees the first updates only, from the weights as they were drawn, at rates that never stay;
the best rate over a whole run, with its schedule and its warm-up, is often several times away from it, lower where
training is long and batches are noisy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from drivetrain.measure.profile.lines import Stream

LOW, HIGH = 1e-6, 10.0  # the usual rates of any optimizer lie between
WIDTH = 4  # losses to each side that a mean is taken over: without lag, which would shift every rate upwards
FALL = 0.02  # of the first loss: a fall that is less is noise
LOST = 4.0  # times the first loss: it has diverged


@dataclass
class RangeTest:
    """Rates, the loss at each, and what is read from them."""

    rates: list[float]
    losses: list[float]
    configured: float

    @cached_property
    def smoothed(self) -> list[float]:
        """The losses, each the mean of those around it."""
        around = [self.losses[max(0, n - WIDTH) : n + WIDTH + 1] for n in range(len(self.losses))]
        return [sum(values) / len(values) for values in around]

    @property
    def steepest(self) -> float | None:
        """The rate at which the loss fell fastest on its way to the lowest; None where it never fell."""
        lowest = self.smoothed.index(min(self.smoothed))
        fell = [a - b for a, b in zip(self.smoothed[:lowest], self.smoothed[2 * WIDTH : lowest + 1], strict=False)]
        if not fell or self.smoothed[0] - self.smoothed[lowest] < FALL * self.smoothed[0]:
            return None
        return self.rates[fell.index(max(fell)) + WIDTH]

    @property
    def bound(self) -> float | None:
        """A tenth of the rate with the lowest loss: near the most that trains; None where the loss never fell."""
        return None if self.steepest is None else self.rates[self.smoothed.index(min(self.smoothed))] / 10


def run(trainer: Any, updates: int) -> RangeTest:
    """Train a finished trainer for at most `updates` updates, the rate rising from LOW to HIGH by the same factor each time."""
    import torch

    trainer.model.train()
    groups = trainer.optimizer.param_groups
    base = [float(group["lr"]) for group in groups]
    top = max(base)
    stream = Stream(trainer.loader.stream(trainer.train_data, _endless(trainer), trainer.device, trainer.memory_format))
    rates: list[float] = []
    losses: list[float] = []
    for number in range(updates):
        rate = LOW * (HIGH / LOW) ** (number / (updates - 1))
        for group, own in zip(groups, base, strict=True):
            _put(group, rate * own / top)
        loss = torch.zeros((), device=trainer.device)
        for micro in stream:
            loss.addcmul_(trainer.micro(micro), micro.weight)
            if micro.last:
                break
        trainer.update()
        trainer.zero_grad()
        if not math.isfinite(float(loss)) or (losses and float(loss) > LOST * losses[0]):
            break
        rates.append(rate)
        losses.append(float(loss))
    return RangeTest(rates, losses, top)


def _endless(trainer: Any) -> Any:
    trainer.epochs = 2**62
    return trainer._requests()


def _put(group: dict[str, Any], rate: float) -> None:
    """A tensor is filled in place, for the graph that holds it."""
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def figure(found: RangeTest) -> dict[str, Any]:
    """Loss against rate, for a page."""
    marks: Sequence[tuple[str, float | None, str]] = (
        ("steepest", found.steepest, "#18794e"),
        ("lowest / 10", found.bound, "#ad5700"),
        ("configured", found.configured, "#8b8d98"),
    )
    span = [min(found.smoothed), max(found.smoothed)]
    lines: list[dict[str, Any]] = [
        {"x": found.rates, "y": found.smoothed, "line": {"color": "#3e63dd"}, "name": "loss"},
        *(
            {"x": [rate, rate], "y": span, "line": {"color": colour, "dash": "dot"}, "name": name}
            for name, rate, colour in marks
            if rate is not None
        ),
    ]
    layout = {
        "margin": {"t": 10, "r": 10}, "legend": {"orientation": "h", "y": -0.25},
        "xaxis": {"type": "log", "exponentformat": "power", "title": {"text": "learning rate"}},
        "yaxis": {"title": {"text": "loss, smoothed"}},
    }  # fmt: skip
    return {"data": [{"type": "scatter", "mode": "lines", **line} for line in lines], "layout": layout}


def advice(found: RangeTest) -> list[str]:
    """What it comes to, in words."""
    if found.steepest is None or found.bound is None:
        between = f"{LOW:g} and {found.rates[-1]:.2g}"
        return [f"range test: the loss fell at no rate between {between}: look at the data and the loss first"]
    return [
        f"range test: the loss fell fastest at lr {found.steepest:.2g}; a tenth of the rate with the lowest loss is "
        f"{found.bound:.2g}; optimizer.lr is {found.configured:.2g}",
        "that is advice, and nothing was set: it saw the first updates only, and the best rate of a whole run is often "
        "several times lower or higher; to know: drivetrain compare optimizer.lr=… quality=true",
    ]

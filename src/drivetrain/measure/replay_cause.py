"""The likely cause of an update's loss: a sample, a layer, or the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from drivetrain.core.step.microbatch import MicroBatch

LOSS, INPUTS = "the loss", "the inputs"  # sizes, like "output of …", "gradient of …" and "update of …"

RECENT, SPIKE = 5, 4.0  # preceding losses that define the usual loss; times their spread
FLOOR, LEAST = 0.1, 0.01  # their spread is at least this share of the usual loss, and of the run's first
FEW, MOST_OF_IT = 0.1, 0.75  # of an update's samples may explain this share of the loss above the usual one
AS_BEFORE = 0.25  # a sample had this share of its loss at the earlier weights already, or it was among the worst there
ODD = 100.0  # times the median of the samples' largest values
FEWEST = 5  # updates that give a range
BEYOND, FAR_BEYOND = 3.0, 10.0  # times its range: an output; gradients and updates, which vary more
WORTH = 1.5  # times: a smaller excess is not reported
FAST = 0.1  # of the size of a matrix: a large update

Sizes = dict[str, float]


@dataclass
class LookedAt:
    """A sample of the update."""

    name: str
    input: float  # the largest absolute value in it and in its target
    alone: MicroBatch | None = None  # the micro-batch of it
    loss: float | None = None  # its own
    gradient: float | None = None  # the norm of its own
    earlier: float | None = None  # its own loss at the earlier weights
    odd: bool = False  # its input is not finite, or far larger than those of others
    target: str = ""
    text: str = ""
    picture: np.ndarray | None = None


@dataclass
class Found:
    """The findings on an update."""

    update: int
    earlier: int  # the update before which the earlier weights were
    samples: list[LookedAt]
    history: dict[int, Sizes]
    unseen: list[str]  # what could not be looked into, and why
    start: int = 0  # the update of the checkpoint
    same: Sequence[int] = ()  # records whose losses are bit for bit those of the run
    other: Sequence[int] = ()  # records whose losses differ


class Cause(NamedTuple):
    """The likely cause: a sample, a layer, the rate, or none; its name, and a sentence."""

    kind: str
    of: str
    said: str


class SizeRange(NamedTuple):
    """A size of an update next to its range in the updates before."""

    what: str
    update: int
    size: float
    low: float
    high: float
    times: float  # by how much it is beyond its range; 1: it is within


def height(loss: float, before: Sequence[float], least: float = 0.0) -> float:
    """How far a loss is above the losses before, in units of their spread, which is at least `least`."""
    usual = median(before[-RECENT:] or [0.0])
    spread = median([abs(each - usual) for each in before[-RECENT:]] or [0.0])
    return (loss - usual) / (spread + FLOOR * abs(usual) + least + 1e-12) if math.isfinite(loss) else math.inf


def worse(*values: float) -> float:
    """The largest of some sizes; one that is not finite is larger than all."""
    return max(value if math.isfinite(value) else math.inf for value in values)


def ranked(samples: Sequence[LookedAt]) -> list[LookedAt]:
    """Samples, the worst first: by an input that is odd, by the loss, by the gradient."""
    usual = median([sample.input for sample in samples] or [0.0])
    for sample in samples:
        sample.odd = sample.input == math.inf or sample.input > ODD * usual > 0
    return sorted(samples, key=lambda s: tuple(-worse(value) for value in (s.odd and s.input, s.loss or 0.0, s.gradient or 0.0)))


def ranges(history: dict[int, Sizes], update: int) -> Iterator[SizeRange]:
    """Yield the sizes of an update in their order: forward, backward, update."""
    for what, value in history[update].items():
        before = [sizes[what] for at, sizes in history.items() if at < update and math.isfinite(sizes.get(what, math.nan))]
        low, high, times = min(before, default=math.nan), max(before, default=math.nan), 1.0
        if len(before) >= FEWEST:
            times = max(1.0, value / max(high, 1e-30), low / max(value, 1e-30) if what.startswith("output") else 1.0)
        yield SizeRange(what, update, value, low, high, times if math.isfinite(value) else math.inf)


def cause(found: Found) -> Cause:
    """The likely cause of an update's loss."""
    losses = [sizes[LOSS] for at, sizes in sorted(found.history.items()) if at < found.update and LOSS in sizes]
    return _samples(found, losses) or _weights(found, losses)


def _samples(found: Found, before: list[float]) -> Cause | None:
    samples, now, then = found.samples, found.history[found.update].get(LOSS, math.nan), f"before update {found.earlier:,} too"
    if not samples or height(now, before) < SPIKE:
        return None  # the loss is as usual
    most, bad = max(1, int(FEW * len(samples))), [sample for sample in samples if sample.odd]
    if 0 < len(bad) <= most:
        others = median(sample.input for sample in samples)
        largest = f"the largest value is {bad[0].input:.4g}, and {others:.4g} in the median sample"
        return _of(bad, "a value of the input or target is not finite" if bad[0].input == math.inf else largest)
    own = [math.nan if sample.loss is None else sample.loss for sample in samples]
    ago = [math.nan if sample.earlier is None else sample.earlier for sample in samples]
    bad = [sample for sample, loss in zip(samples, own, strict=True) if not math.isfinite(loss)]
    if bad or not all(map(math.isfinite, ago)):
        alike = len(bad) <= most and not any(math.isfinite(loss) for loss in ago[: len(bad)])
        return _of(bad, f"the loss is not finite, at the weights {then}") if bad and alike else None
    usual = median(before[-RECENT:] or [0.0])
    for few in range(1, most + 1):
        excess, whole, least = sum(own[:few]) - few * usual, sum(own) - len(own) * usual, min(ago[:few])
        stood_out = least >= min(sorted(ago)[-few], AS_BEFORE * own[0])
        if stood_out and excess >= MOST_OF_IT * whole > 0:
            share = f"{min(1.0, excess / whole):.0%} of what the loss is above the updates before"
            return _of(samples[:few], f"{share}, and it stood out at the weights {then}")
    return None


def _of(bad: Sequence[LookedAt], said: str) -> Cause:
    more = f" and {len(bad) - 2} more" if len(bad) > 2 else ""
    return Cause("sample", bad[0].name, f"the sample{'s' * (len(bad) > 1)} {', '.join(s.name for s in bad[:2])}{more}: {said}")


def _weights(found: Found, before: list[float]) -> Cause:
    each = (each for at in sorted(found.history) if at <= found.update for each in ranges(found.history, at) if each.what != LOSS)
    first = next((r for r in each if r.times >= (BEYOND if r.what.startswith(("output", INPUTS)) else FAR_BEYOND)), None)
    until = found.update if first is None else first.update
    moves = [[v for what, v in found.history[at].items() if what.startswith("update")] for at in found.history if at < until]
    moved = median([median(each) for each in moves[-RECENT:] if each] or [0.0])
    if moved >= FAST and not (before and found.history[found.update].get(LOSS, math.nan) < before[0]):
        share = f"an update moved the matrices by {moved:.0%} of their size in the updates before"
        return Cause("rate", "", f"the learning rate: {share}")
    if first is None:
        usual = ", and its loss is as usual" if height(found.history[found.update].get(LOSS, 0.0), before) < SPIKE else ""
        return Cause("none", "", f"no sample and no layer stands out{usual}")
    at_once = [each for each in ranges(found.history, first.update) if each.what.startswith("output")]
    grew = [each.what for each in at_once[: at_once.index(first) if first in at_once else None] if each.times > WORTH]
    if grew and math.isfinite(first.size):
        return Cause(
            "rate", "", f"the learning rate: in update {first.update:,} {', '.join(grew[:3])} and {first.what} grew together"
        )
    size = f"{first.size:.3g}" if math.isfinite(first.size) else "not finite"
    usual = "" if math.isnan(first.low) else f", and was {first.low:.3g} to {first.high:.3g} in the updates before"
    said = f"{first.what}, the first that left its range: in update {first.update:,} it is {size}{usual}"
    return Cause("sample" if first.what == INPUTS else "layer", first.what.partition(" of ")[2], said)

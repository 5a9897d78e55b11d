"""Judges what was found of an update: was it a sample, a layer, or the learning rate?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from drivetrain.measure.replay.record import Found, LookedAt, Sizes

FEWEST = 5  # updates that give a range
RECENT = 10  # updates in which a layer may have left its range before the update itself
BEYOND = 3.0  # times its range
FAST = 0.1  # of the size of a matrix: an update that moves it so far is large
GREW = 10.0  # times: gradients that grew on and on
SPIKE = 2.0  # times what the largest of the losses before was above the usual one
FEW = 0.1  # of the samples of an update that may explain its loss
MOST_OF_IT = 0.75  # of what the loss is above those before
AS_BEFORE = 0.25  # of that, which a sample had at the earlier weights already


class Cause(NamedTuple):
    """The likely cause: a kind, what it is of, and a sentence."""

    kind: str  # sample, layer, rate, weights, or none
    of: str
    said: str


class SizeRange(NamedTuple):
    """A size of an update beside those before."""

    name: str
    update: int
    size: float
    low: float
    high: float
    times: float  # that it is beyond its range; 1: it is within


def ranges(history: Mapping[int, Sizes], update: int) -> Iterator[SizeRange]:
    """Yield the sizes of an update in the order in which they come about: forward, backward, update."""
    for name, value in history[update].items():
        before = [sizes[name] for at, sizes in history.items() if at < update and math.isfinite(sizes.get(name, math.nan))]
        low, high, times = min(before, default=math.nan), max(before, default=math.nan), 1.0
        if len(before) >= FEWEST:
            fell = low / max(value, 1e-30) if name.startswith("output") else 1.0
            times = max(1.0, value / max(high, 1e-30), fell)
        yield SizeRange(name, update, value, low, high, times if math.isfinite(value) else math.inf)


def departed(history: Mapping[int, Sizes], update: int) -> SizeRange | None:
    """The first that is not finite or left its range in the last updates."""
    recent = (at for at in sorted(history) if update - RECENT < at <= update)
    return next((each for at in recent for each in ranges(history, at) if each.times >= BEYOND), None)


def cause(found: Found) -> Cause:
    """The likely cause of an update's loss."""
    return _samples(found) or _weights(found)


def _samples(found: Found) -> Cause | None:
    """The samples that explain the loss, and did so at the earlier weights too."""
    samples, before = found.samples, [loss for at, loss in found.losses.items() if at < found.update and math.isfinite(loss)]
    if bad := [sample for sample in samples if sample.input == math.inf]:
        return Cause("sample", bad[0].name, f"{_named(bad)}: a value of the input or target is not finite")
    if any(sample.loss is None or sample.earlier is None for sample in samples):
        return None
    most = max(1, int(FEW * len(samples)))
    ago = f"at the weights before update {found.earlier:,} too"
    if bad := [sample for sample in samples if not math.isfinite(_own(sample))]:
        if len(bad) <= most and not any(math.isfinite(sample.earlier or 0.0) for sample in bad):
            return Cause("sample", bad[0].name, f"{_named(bad)}: the loss is not finite, and {ago}")
        return None
    recent = before[-RECENT:] or [0.0]
    usual, usual_earlier = median(recent), median(sample.earlier or 0.0 for sample in samples)
    if found.losses[found.update] - usual <= SPIKE * (max(recent) - usual):
        return None
    above = [_own(sample) - usual for sample in samples]
    for few in range(1, most + 1):
        excess = sum(above[:few])
        stood_out = all((s.earlier or 0.0) - usual_earlier >= AS_BEFORE * (_own(s) - usual) for s in samples[:few])
        if excess > 0 and excess >= MOST_OF_IT * sum(above) and sum(above) > 0 and stood_out:
            said = f"{_named(samples[:few])}: {excess / sum(above):.0%} of what the loss is above the updates before, and {ago}"
            return Cause("sample", samples[0].name, said)
    return None


def _own(sample: LookedAt) -> float:
    return math.nan if sample.loss is None else sample.loss


def _named(samples: Sequence[LookedAt]) -> str:
    more = f" and {len(samples) - 2} more" if len(samples) > 2 else ""
    return f"the sample{'s' * (len(samples) > 1)} {', '.join(sample.name for sample in samples[:2])}{more}"


def _weights(found: Found) -> Cause:
    """The layer or the learning rate, where no sample is the cause."""
    first = departed(found.history, found.update)
    until = first.update if first is not None else found.update
    before = [found.history[at] for at in sorted(found.history) if at < until]
    moved = [median(each) for sizes in before[-RECENT:] if (each := _of(sizes, "update"))]
    if moved and median(moved) >= FAST:
        return Cause(
            "rate",
            "",
            f"the learning rate: an update moved the matrices by {median(moved):.0%} of their size in the updates before",
        )
    if first is not None:
        phase = {"output": "forward", "gradie": "backward"}.get(first.name[:6], "update")
        size = (
            "is not finite"
            if not math.isfinite(first.size)
            else f"is {first.size:.3g}, and was {first.low:.3g} to {first.high:.3g}"
        )
        where = f"in update {first.update}" if first.update < found.update else "in this update"
        said = f"{first.name}, the first in the {phase} that left its range: {where} it {size} in the updates before"
        return Cause("layer", first.name.partition(" of ")[2], said)
    gradients = [median(each) for sizes in before if (each := _of(sizes, "gradient"))]
    if len(gradients) >= FEWEST and gradients[-1] >= GREW * median(gradients[:FEWEST]):
        grew = gradients[-1] / median(gradients[:FEWEST])
        return Cause(
            "rate", "", f"the learning rate: gradients grew {grew:.0f} times in {len(gradients)} updates, in all layers alike"
        )
    return Cause("none", "", "no sample and no layer stands out")


def _of(sizes: Sizes, kind: str) -> list[float]:
    return [value for name, value in sizes.items() if name.startswith(f"{kind} of") and math.isfinite(value)]

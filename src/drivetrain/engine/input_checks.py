"""A look at what the model gets, and when: inputs that nobody normalised, or that come late, and nothing else says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.engine.step_timer import StepTimer

LOOK_AT = 32  # samples: enough to tell 128 from 0
FAR = 3.0  # a spread of 3 or 1/3 is far from 1
LATE = 0.2  # of the time: less is not worth a word
STEPS, SECONDS = 20, 2.0  # that are looked at, after the warm-up


def remark(x: torch.Tensor) -> str | None:
    """What to say of inputs (n, …) whose mean is beyond their spread, or whose spread is far from 1; images by channel."""
    if not x.is_floating_point() or x[:1].numel() < 2:
        return None
    x = x[:LOOK_AT].detach().float()
    by_channel = x.transpose(0, 1).flatten(1) if x.ndim > 2 else x.reshape(1, -1)
    std, mean = torch.std_mean(by_channel, dim=1)
    off = [
        f"channel {channel}: mean {m:.3g}, std {s:.3g}"
        for channel, (m, s) in enumerate(torch.stack([mean, std], 1).tolist())
        if s > FAR or s < 1 / FAR or abs(m) > s
    ]
    if not off:
        return None
    more = f" and {len(off) - 3} more" if len(off) > 3 else ""
    return (
        f"the model's inputs are not normalised ({'; '.join(off[:3])}{more}; wanted about 0 and 1): training is slower and less "
        "stable so: set data.normalize, or normalise in your own data"
    )


def looked_at(stream: Iterator[MicroBatch], say: Callable[[str], None]) -> Iterator[MicroBatch]:
    """The stream, after a look at its first micro-batch: one read of the device, before the first step."""
    for first in stream:
        if (line := remark(first.x)) is not None:
            say(line)
        yield first
        break
    yield from stream


def on_time(
    stream: Iterator[MicroBatch], clock: StepTimer, help_by: str | None, say: Callable[[str], None]
) -> Iterator[MicroBatch]:
    """The stream; once there is enough to judge by, a word if the steps wait for it, and the override that helps."""
    for micro in stream:
        yield micro
        if len(clock.steps) % STEPS or not (steady := clock.steady()) or steady[0] < SECONDS:
            continue
        if steady[1] > LATE:
            helps = f": {help_by}" if help_by else ""
            say(f"the device waits for data {100 * steady[1]:.0f} % of the time{helps}")
        break
    yield from stream

"""Checks of the training stream: inputs that are not normalised, and inputs that come late."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.step import StreamWatcher
from drivetrain.engine.step_timer import StepTimer

logger = logging.getLogger(__name__)

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


def watchers(timer: StepTimer, advice: str | None) -> list[StreamWatcher]:
    """The checks, as functions that the training stream passes through; `advice` is what helps where data comes late."""
    return [check_normalisation, lambda stream: check_waiting(stream, timer, advice)]


def check_normalisation(stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Look at the first micro-batch: one read of the device, before the first step."""
    for first in stream:
        if (line := remark(first.x)) is not None:
            logger.warning(line)
        yield first
        break
    yield from stream


def check_waiting(stream: Iterator[MicroBatch], timer: StepTimer, advice: str | None) -> Iterator[MicroBatch]:
    """Warn once if the steps wait for their data, as soon as there are enough of them to judge by."""
    for batch in stream:
        yield batch
        if len(timer.steps) % STEPS or not (steady := timer.steady()) or steady[0] < SECONDS:
            continue
        if steady[1] > LATE:
            logger.warning(f"the device waits for data {100 * steady[1]:.0f} % of the time{f': {advice}' if advice else ''}")
        break
    yield from stream

"""Checks the training stream for inputs that are not normalised and for steps that wait for data."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.option import RunSpec
from drivetrain.core.step import StreamWatcher
from drivetrain.core.trees import named_leaves
from drivetrain.engine.step_timer import StepTimer
from drivetrain.loss.base import Loss

logger = logging.getLogger(__name__)

MAX_SAMPLES = 32  # samples checked: enough to tell a mean of 128 from 0
MAX_STD = 3.0  # a standard deviation above 3 or below 1/3 is far from 1
MAX_WAIT = 0.2  # share of the time; less is not worth a warning
MIN_STEPS, MIN_SECONDS = 20, 2.0  # measured after the warm-up before the wait is judged


def normalisation_warning(x: torch.Tensor) -> str | None:
    """Return a warning if the inputs (n, …) have a mean beyond their standard deviation, or one far from 1; None if not.

    Images are checked by channel.
    """
    if not x.is_floating_point() or x[:1].numel() < 2:
        return None
    x = x[:MAX_SAMPLES].detach().float()
    by_channel = x.transpose(0, 1).flatten(1) if x.ndim > 2 else x.reshape(1, -1)
    std, mean = torch.std_mean(by_channel, dim=1)
    bad = [
        f"channel {channel}: mean {m:.3g}, std {s:.3g}"
        for channel, (m, s) in enumerate(torch.stack([mean, std], 1).tolist())
        if s > MAX_STD or s < 1 / MAX_STD or abs(m) > s
    ]
    if not bad:
        return None
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return (
        f"the model's inputs are not normalised ({'; '.join(bad[:3])}{more}; wanted about 0 and 1): this can slow training "
        "down. Set data.normalize=measured, where the data has it, or normalise in your own data"
    )


def watchers(run: RunSpec, loss: Loss, outputs: int, timer: StepTimer, advice: str | None) -> list[StreamWatcher]:
    """Return the checks as stream watchers; `advice` is the remedy to name where data comes late."""
    return [
        lambda stream: check_targets(stream, run, loss, outputs), check_normalisation,
        lambda stream: check_waiting(stream, timer, advice),
    ]  # fmt: skip


def check_targets(stream: Iterator[MicroBatch], run: RunSpec, loss: Loss, outputs: int) -> Iterator[MicroBatch]:
    """Raise UserError if the targets of the first micro-batch do not fit the loss and the model's `outputs`."""
    for first in stream:
        if not isinstance(first.y, torch.Tensor) and not loss.takes_trees:
            parts = ", ".join(name for name, _ in named_leaves(first.y))
            raise UserError(
                f"{run.named('loss')} compares the output with one tensor, and the targets of {run.named('data')} are several "
                f"({parts}): choose one of them (data.target_key), or set loss=own, with a function that takes them"
            )
        if (problem := loss.problem(first.y, outputs)) is not None:
            raise UserError(f"{run.named('loss')} does not fit the data: the targets of {run.named('data')} {problem}")
        yield first
        break
    yield from stream


def check_normalisation(stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Check the first micro-batch: one read from the device, before the first step."""
    for first in stream:
        for name, x in named_leaves(first.x):
            if (line := normalisation_warning(x)) is not None:
                logger.warning(f"{name}: {line}" if name else line)
        yield first
        break
    yield from stream


def check_waiting(stream: Iterator[MicroBatch], timer: StepTimer, advice: str | None) -> Iterator[MicroBatch]:
    """Warn once if the steps wait for data, as soon as enough of them are measured."""
    judged = 0  # steps
    for batch in stream:
        yield batch
        if len(timer.steps) < judged + MIN_STEPS:
            continue
        judged = len(timer.steps)
        if not (steady := timer.steady()) or steady[0] < MIN_SECONDS:
            continue
        if steady[1] > MAX_WAIT:
            logger.warning(f"the device waits for data {100 * steady[1]:.0f} % of the time{f': {advice}' if advice else ''}")
        break
    yield from stream

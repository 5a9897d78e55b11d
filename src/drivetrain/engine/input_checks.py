"""Checks the training stream for wrong targets, unnormalised images, and steps that wait for data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from itertools import islice

import torch

from drivetrain.core.errors import UserError
from drivetrain.core.options.option import RunSpec
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.source import Source, original
from drivetrain.core.step.step import Stream, StreamWatcher
from drivetrain.core.step.trees import named_leaves
from drivetrain.engine.context import RunContext
from drivetrain.engine.step_timer import StepTimer
from drivetrain.engine.trainer import Trainer
from drivetrain.loss.base import Loss

logger = logging.getLogger(__name__)

MAX_SAMPLES = 32  # samples checked: enough to distinguish a mean of 128 from 0
MAX_STD = 3.0  # a standard deviation above 3 or below 1/3 is far from 1
MAX_WAIT = 0.2  # share of the time; less is not worth a warning
MIN_STEPS, MIN_SECONDS = 20, 2.0  # measured after the warm-up before the wait is judged


def normalisation_warning(x: torch.Tensor) -> str | None:
    """Return a warning if a channel of images (n, c, h, w) has a mean beyond its standard deviation, or that far from 1.

    None for all else: numbers of other kinds have other scales.
    """
    if not x.is_floating_point() or x.ndim != 4 or x[:1].numel() < 2:
        return None
    std, mean = torch.std_mean(x[:MAX_SAMPLES].detach().float().transpose(0, 1).flatten(1), dim=1)
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


def watchers(context: RunContext, trainer: Trainer, no_mfu: str) -> list[StreamWatcher]:
    """Return the checks as stream watchers; `no_mfu` is the reason for a missing MFU."""
    sets = {f"{split} {name}".rstrip(): each for split, of in context.evaluated.items() for name, each in of.items()}
    sources = {name: pipeline.source for name, pipeline in {"training": context.train_data, **sets}.items()}
    first = FirstBatch(
        context.run, trainer.evaluator.loss, context.data.classes, sources, lambda: next(trainer.requests()).indices,
        lambda: trainer.progress.steps == 0, no_mfu and f"no MFU: {no_mfu}",
    )  # fmt: skip
    advice = trainer.loader.advice(context.train_data)
    return [first.watch, lambda stream: check_waiting(stream, trainer.timer, advice)]


@dataclass
class FirstBatch:
    """Looks at the first micro-batch before the first step, with one read from the device, and logs the rest later."""

    run: RunSpec
    loss: Loss
    outputs: int  # of the model
    sources: Mapping[str, Source]  # the sets by their names
    indices: Callable[[], torch.Tensor]  # of the first micro-batch's samples
    is_start: Callable[[], bool]  # whether the run begins here instead of being resumed
    note: str  # logged after the first step: an error in it comes first

    def watch(self, stream: Stream) -> Stream:
        """Pass the stream on, and hold no batch of it. Raises UserError where targets do not fit."""
        yield from map(self._checked, islice(stream, 1))
        if self.note:
            logger.info("%s", self.note)
            self.note = ""
        yield from stream

    def _checked(self, first: MicroBatch) -> MicroBatch:
        self.check_targets(first)
        for name, x in named_leaves(first.x) if self.is_start() else ():
            if (line := normalisation_warning(x)) is not None:
                logger.warning(f"{name}: {line}" if name else line)
        return first

    def check_targets(self, first: MicroBatch) -> None:
        """Raise UserError if targets do not fit the loss and the model's outputs; it names the first wrong sample."""
        y, run = first.y, self.run
        if not isinstance(y, torch.Tensor):
            if not self.loss.takes_trees:
                raise UserError(
                    f"{run.named('loss')} compares the output with one tensor, and the targets of {run.named('data')} are "
                    f"several ({', '.join(name for name, _ in named_leaves(y))}): choose one of them (data.target_key), or set "
                    "loss=own, with a function of all of them"
                )
            return
        self._check("training", y, lambda which: int(self.indices()[which]))
        for name, source in self.sources.items() if y.dim() == 1 and not y.is_floating_point() else ():
            if (labels := source.labels()) is not None:
                self._check(name, labels, lambda which: which)

    def _check(self, name: str, targets: torch.Tensor, index_of: Callable[[int], int]) -> None:
        """Check targets of a set; `index_of` gives the number of a sample in it."""
        if (problem := self.loss.problem(targets, self.outputs)) is None:
            return
        run, which = self.run, self._first_wrong(targets)
        so = "" if which is None else f". The first of them is {self._named(name, index_of(which))}"
        raise UserError(f"{run.named('loss')} does not fit the data: the targets of {run.named('data')} {problem}{so}")

    def _named(self, name: str, index: int) -> str:
        """Return a name for a sample of a set, with its number in the user's own data where the set may be a part of it."""
        source, index = original(self.sources[name], index)
        called = source.name(index)
        return f"sample {index} of {self.run.named('data')} ({f'{called}, ' if called else ''}in the {name} set)"

    def _first_wrong(self, targets: torch.Tensor) -> int | None:
        """Return the first wrong target; None where all of them are wrong, or none alone is."""
        low, high = 0, len(targets)
        if all(self.loss.problem(targets[i : i + 1], self.outputs) is not None for i in {0, high // 2, high - 1}):
            return None
        while high - low > 1:  # the first wrong one is between them
            middle = (low + high) // 2
            low, high = (low, middle) if self.loss.problem(targets[:middle], self.outputs) is not None else (middle, high)
        return low if self.loss.problem(targets[low:high], self.outputs) is not None else None


def check_waiting(stream: Stream, timer: StepTimer, advice: str | None) -> Stream:
    """Warn once if the steps wait for data, as soon as enough of them are measured; from then on it holds no batch."""
    share = yield from wait_measured(stream, timer)
    if share > MAX_WAIT:
        logger.warning(f"the device waits for data {100 * share:.0f} % of the time{f': {advice}' if advice else ''}")
    yield from stream


def wait_measured(stream: Stream, timer: StepTimer) -> Generator[MicroBatch, None, float]:
    """Yield the stream until enough steps are measured. Return the share of the time spent waiting; 0 where it ended before."""
    judged = len(timer.steps)
    for batch in stream:
        yield batch
        if len(timer.steps) < judged + MIN_STEPS:
            continue
        judged = len(timer.steps)
        if (steady := timer.steady()) and steady[0] >= MIN_SECONDS:
            return steady[1]
    return 0.0

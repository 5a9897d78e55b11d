"""Runs updates, and times their phases."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

from drivetrain.core.errors import Diverged
from drivetrain.core.machine.device import synchronize
from drivetrain.core.step.microbatch import MicroBatch, one_update
from drivetrain.engine.callbacks import CallbackStep
from drivetrain.engine.step import PlainStep
from drivetrain.engine.trainer import Trainer
from drivetrain.engine.update_step import UpdateStep
from drivetrain.measure.profile.sampler import thread_clock

DATA = "data wait"


class TrackedStream(Iterator[MicroBatch]):
    """The training stream. `phase` says what runs: "data" while it is read, then "micro_batch", then "update"."""

    def __init__(self, stream: Iterator[MicroBatch]) -> None:
        self._stream, self.phase = stream, "micro_batch"

    def __next__(self) -> MicroBatch:
        self.phase = "data"
        try:
            return next(self._stream)
        finally:
            self.phase = "micro_batch"


def update(trainer: Trainer, stream: Iterator[MicroBatch]) -> None:
    """Run one update and what comes after it, as the training loop does."""
    progress = trainer.progress
    for micro in one_update(stream):
        if micro.last:
            trainer.scheduler.step(progress.updates)
        trainer.step.micro_batch(micro, trainer.log.loss_sum)
    if isinstance(stream, TrackedStream):
        stream.phase = "update"
    if trainer.step.update():
        progress.updates += 1
        trainer.ema.update()
    else:
        progress.skipped += 1
    trainer.step.zero_grad()
    trainer.timer.step(trainer.compiler.waits())
    if progress.steps % trainer.log_every == 0:
        trainer.compiler.settle()
        with suppress(Diverged):  # a profile makes more updates than the run was meant for: their time is what counts
            trainer.log.train(trainer.optimizer.param_groups[0]["lr"])


REST = "schedule, records and callbacks"
P = ParamSpec("P")
T = TypeVar("T")


class TimedPhases:
    """Times the phases of updates, and the rest of them. The device is synchronized after each phase."""

    def __init__(self, trainer: Trainer, stream: TrackedStream) -> None:
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._clock, self._device = thread_clock(), trainer.device
        self.read_s: list[float] = []
        step = self._apart(trainer.step)
        timed: Any = copy(trainer)
        timed.ema = SimpleNamespace(update=self._timed("update", trainer.ema.update))
        timed.step = SimpleNamespace(
            micro_batch=step.micro_batch,
            update=self._timed("update", step.update),
            zero_grad=self._timed("update", step.zero_grad),
        )
        self.update = self._timed("", partial(update, timed, self._reads(stream)))

    def _apart(self, step: Any) -> Any:
        """The step divided into its phases; a step with other wrappers, such as one graph, is a single phase."""
        if type(step) is CallbackStep:
            return dataclasses.replace(step, inner=self._apart(step.inner))
        if type(step) is UpdateStep:
            return dataclasses.replace(step, inner=self._apart(step.inner), waiting=[])
        if not isinstance(step, PlainStep):
            given = {name: getattr(step, name) for name in ("update", "zero_grad")}
            return SimpleNamespace(micro_batch=self._timed("step", step.micro_batch), **given)
        plain, backward = step.precision, self._timed("backward", step.precision.backward)
        parts = SimpleNamespace(
            forward=self._timed("forward", step.forward),
            loss=SimpleNamespace(step=self._timed("loss", step.loss.step)),
            precision=SimpleNamespace(autocast=plain.autocast, backward=backward, step=plain.step),
        )
        return dataclasses.replace(step, **vars(parts))

    def _timed(self, phase: str, call: Callable[P, T]) -> Callable[P, T]:
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            began = self._clock()
            result = call(*args, **kwargs)
            synchronize(self._device)
            self._spent[phase] += (self._clock() - began).own
            return result

        return run

    def _reads(self, stream: TrackedStream) -> Iterator[MicroBatch]:
        read = self._timed(DATA, lambda: next(stream))
        while True:
            micro = read()
            if micro.seconds is not None:
                self.read_s.append(micro.seconds)
            yield micro

    def taken(self) -> dict[str, float]:
        """Seconds of the updates since the last call by phase, whose sum is their time."""
        spent, self._spent = dict(self._spent), defaultdict(float)
        whole = spent.pop("")
        if "loss" in spent:  # which runs the forward
            spent["loss"] -= spent["forward"]
        return {**spent, REST: max(0.0, whole - sum(spent.values()))}

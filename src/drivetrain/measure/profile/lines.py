"""Profiles the user's own lines within a step: their shares of its time, what they read back and what they create."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from drivetrain.core import trees
from drivetrain.core.device import synchronize
from drivetrain.core.errors import Diverged
from drivetrain.debug.torch_modes import WaitingCalls
from drivetrain.measure.profile.attribution import Attribution, Line, Samples, attribute
from drivetrain.measure.profile.operations import Recorder, operation_clock
from drivetrain.measure.profile.sampler import Sampler
from drivetrain.measure.profile.sites import user_line

UPDATES = 3  # in which every operation is recorded
ROUNDS = 4  # of sampling
MAX_SLOWER = 4  # times the wanted seconds, where other work has the cores


class TrackedStream:
    """The training stream. `phase` says what runs: "data" while it is read, then "micro_batch", then "update"."""

    def __init__(self, stream: Iterator[Any]) -> None:
        self._stream, self.phase = stream, "micro_batch"

    def __iter__(self) -> TrackedStream:
        return self

    def __next__(self) -> Any:
        self.phase = "data"
        try:
            return next(self._stream)
        finally:
            self.phase = "micro_batch"


def update(trainer: Any, stream: Iterable[Any]) -> None:
    """Run one update and what comes after it, as the training loop does."""
    progress = trainer.progress
    for micro in stream:
        if micro.last:
            trainer.scheduler.step(progress.updates)
        trainer.step.micro_batch(micro, trainer.log.loss_sum)
        if micro.last:
            break
    if isinstance(stream, TrackedStream):
        stream.phase = "update"
    if trainer.step.update():
        progress.updates += 1
        trainer.ema.update()
    else:
        progress.skipped += 1
    trainer.step.zero_grad()
    trainer.timer.step()
    if progress.steps % trainer.log_every == 0:
        with suppress(Diverged):  # a profile makes more updates than the run was meant for: their time is what counts
            trainer.log.train(trainer.optimizer.param_groups[0]["lr"])


def read_update(stream: TrackedStream) -> tuple[Any, int]:
    """Read the micro-batches of one update; return the last one and how many there are."""
    for count, micro in enumerate(stream, 1):
        if micro.last:
            return micro, count
    raise RuntimeError("the data ended")


def profile_lines(trainer: Any, stream: TrackedStream, profile_s: float, busy: float = 0.0) -> tuple[Attribution, int, float]:
    """Attribute an update's time to the user's own lines. `busy` is the share of it in which an accelerator works.

    Sampling costs little, and the shares are those of samples. What operations a line runs is recorded in a few other updates.
    Returns the attribution, the number of operations in an update, and an update's milliseconds while nothing watched it.
    """
    helpers = trainer.device.type != "cpu" or threading.active_count() > 1  # threads of the backward, or of the loader
    sampler = Sampler(lambda: stream.phase, update.__code__, helpers)
    step_ms, watched = _sample(trainer, stream, sampler, profile_s)
    micro, _ = read_update(stream)
    small_size = sum(t.numel() for t in trees.leaves(micro.x)) // 16
    recorder = Recorder(lambda: stream.phase, operation_clock(trainer.device), update.__code__, small_size)
    with recorder.recording():
        for _ in range(UPDATES):
            update(trainer, stream)
    found = attribute(sampler.spent, recorder.operations, UPDATES, busy, watched)
    by_place = {line.place: line for line in found.lines}
    for place, count in _host_reads(trainer, stream).items():
        if place not in by_place:
            found.lines.append(by_place.setdefault(place, Line(place)))
        by_place[place].host_reads = -(-count // UPDATES)
    operations = sum(1 + o.backward_operations for o in recorder.operations if o.phase != "data")
    return found, operations // UPDATES, step_ms


def _sample(trainer: Any, stream: TrackedStream, sampler: Sampler, profile_s: float) -> tuple[float, int]:
    """Sample for `profile_s` seconds, and time as long without. Return the milliseconds of an update of the latter, and the
    number of sampled updates.
    """
    seconds, count, watched = 0.0, 0, 0
    for _ in range(ROUNDS):  # in turns, as the machine's speed changes
        synchronize(trainer.device)
        began, before = time.perf_counter(), count
        while time.perf_counter() - began < profile_s / ROUNDS or count == before:
            update(trainer, stream)
            count += 1
        synchronize(trainer.device)
        seconds += time.perf_counter() - began
        began = time.perf_counter()
        with sampler.watching() as own_s:
            # On a busy machine it takes longer until as much of the run was seen.
            while own_s() < profile_s / ROUNDS and time.perf_counter() - began < MAX_SLOWER * profile_s / ROUNDS:
                update(trainer, stream)
                watched += 1
    return 1e3 * seconds / count, watched


def reading_lines(trainer: Any, seconds: float) -> Samples:
    """Read batches in this process, and sample it: the loader's own processes cannot be watched."""
    sampler = Sampler(lambda: "data", reading_lines.__code__, threading.active_count() > 1)
    until = time.perf_counter() + seconds
    with sampler.watching():
        for request in trainer.requests():
            trainer.train_data(request)
            if time.perf_counter() > until:
                break
    return sampler.spent


def _host_reads(trainer: Any, stream: TrackedStream) -> Counter[str]:
    """How often each user line makes the host wait for the device, or would on CUDA."""
    found: Counter[str] = Counter()

    def count(_: str) -> None:
        place = user_line(sys._getframe(1), update.__code__)
        if place is not None and stream.phase != "data":
            found[place] += 1

    with WaitingCalls(count):
        for _ in range(UPDATES):
            update(trainer, stream)
    return found

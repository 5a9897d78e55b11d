"""The profile of a run's step: where its time goes, which of the user's own lines take it, and what it is measured by."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from drivetrain.core.machine.device import clock_for, synchronize
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import one_update
from drivetrain.debug.torch_modes import waiting_calls
from drivetrain.engine.flops import measured
from drivetrain.engine.trainer import Trainer
from drivetrain.measure import intervals
from drivetrain.measure.benchmark.interleave import WARMUP_UPDATES, short_updates
from drivetrain.measure.forecast.roofline import bandwidth
from drivetrain.measure.profile.attribution import WAITING, Attribution, CodeLine, attribute, together
from drivetrain.measure.profile.device_time import IDLE, device_shares
from drivetrain.measure.profile.operations import OperationRecorder, TimedOperation
from drivetrain.measure.profile.phases import DATA, TimedPhases, TrackedStream, update
from drivetrain.measure.profile.sampler import Clocks, Samples, Spent, ThreadClock, own_seconds, sampled, thread_clock
from drivetrain.measure.profile.user_code import user_line
from drivetrain.saving import checkpoint_io

UPDATES = 3  # in which what reads a value back from the device is counted
LOOKS = 8  # in turns, in each of which an update is looked at in every way: their spread is that of the figures
MAX_SLOWER = 4  # times the wanted seconds, where other work has the cores


class Turn(NamedTuple):
    """The machine and the wait for data, by one of several looks at updates."""

    step_s: float  # of an update as it is, unwatched
    flops: float  # a second, of the device's matrix products in the format of the step
    phases: dict[str, float]  # seconds, whose sum is that of some updates


@dataclass(kw_only=True)
class Looked(Attribution):
    """The findings of several looks at updates, without the time in which these waited for a core."""

    turns: list[Turn]
    step_ms: float  # of an update as it is, unwatched
    phases: dict[str, float]  # ms of an update by phase; the device is synchronized after each
    utilization: dict[str, float]  # shares of an update's time
    read_ms: float | None  # of reading one micro-batch
    queued: float  # the share of the unwatched time in which the step waited for a core that other programs had
    threads: int  # that torch computes with

    @property
    def waits_for_data(self) -> intervals.Interval:
        """The share of an update in which it waits for data, with its interval."""
        shares = [turn.phases.get(DATA, 0.0) / (sum(turn.phases.values()) or 1.0) for turn in self.turns]
        return intervals.around(self.phases.get(DATA, 0.0) / sum(self.phases.values()), shares)


def look(trainer: Trainer, stream: TrackedStream, profile_s: float) -> Looked:
    """Look at updates in turns: as they are, sampled, by their phases, and with each operation recorded.

    The machine's speed changes, so each look is repeated, and the spread gives the intervals.
    """
    on_cpu, block_s = trainer.device.type == "cpu", profile_s / LOOKS
    utilization = {} if on_cpu else device_shares(trainer, stream)
    busy = 1 - utilization.get(IDLE, 1.0)  # the share of the time in which an accelerator works
    phases = TimedPhases(trainer, stream)
    small_size = sum(t.numel() for micro in one_update(stream) if micro.last for t in trees.leaves(micro.x)) // 16
    plain, watched, counted, took = 0, 0, 0, Spent()
    samples: list[Samples] = []
    recorded: list[TimedOperation] = []
    looks: list[Attribution] = []
    turns: list[Turn] = []

    def block(once: Callable[[], None], clock: Clocks) -> tuple[int, Spent]:
        count = 0
        # On a busy machine it takes longer until as much of the run was seen.
        while not count or ((now := clock()).own < block_s and now.wall < MAX_SLOWER * block_s):
            once()
            count += 1
        synchronize(trainer.device)
        return count, clock()

    for _ in range(LOOKS):
        synchronize(trainer.device)
        updates, seconds = block(lambda: update(trainer, stream), thread_clock())
        plain, took = plain + updates, took + seconds
        step_s = seconds.own / updates
        with sampled(lambda: stream.phase, update.__code__) as (clock, spent):
            seen, _ = block(lambda: update(trainer, stream), clock)
        counted += block(phases.update, thread_clock())[0]
        recorder = OperationRecorder(
            lambda: stream.phase, ThreadClock() if on_cpu else clock_for(trainer.device), update.__code__, small_size
        )
        with recorder.recording():
            update(trainer, stream)
        turns.append(Turn(step_s, measured(trainer.device, trainer.log.mfu.number_format), phases.taken()))
        looks.append(attribute(spent, recorder.operations, 1, busy, seen))
        samples.append(spent)
        watched, recorded = watched + seen, recorded + recorder.operations
    found = attribute(together(samples), recorded, LOOKS, busy, watched)
    shares = [{line.place: line.share for line in look.lines} for look in looks]
    for line in found.lines:
        line.looks = tuple(share.get(line.place, 0.0) for share in shares)
    _count_host_reads(trainer, stream, found.lines)
    step_ms = 1e3 * took.own / plain
    of_phases = {name: sum(turn.phases.get(name, 0.0) for turn in turns) for turn in turns for name in turn.phases}
    return Looked(
        found.lines,
        found.rest,
        turns=turns,
        step_ms=step_ms,
        phases={name: 1e3 * seconds / counted for name, seconds in of_phases.items()},
        utilization=_cpu_shares(recorded, LOOKS * step_ms, found.rest.get(WAITING, 0.0)) if on_cpu else utilization,
        read_ms=1e3 * statistics.fmean(phases.read_s) if phases.read_s else None,
        queued=max(0.0, 1 - took.own / took.wall),
        threads=torch.get_num_threads(),
    )


def reading_lines(trainer: Trainer, seconds: float) -> Samples:
    """Read batches in this process, and sample it: the loader's own processes cannot be watched."""
    with sampled(lambda: "data", reading_lines.__code__) as (clock, spent):
        for request in trainer.requests():
            trainer.train_data(request)
            if clock().wall > seconds:
                break
    return spent


def _count_host_reads(trainer: Trainer, stream: TrackedStream, lines: list[CodeLine]) -> None:
    """Count how often in an update each user line makes the host wait for the device, or would on CUDA."""
    found: Counter[str] = Counter()

    def count(_: str) -> None:
        if stream.phase != "data":
            found[user_line(sys._getframe(1), update.__code__)] += 1

    with waiting_calls(count):
        for _ in range(UPDATES):
            update(trainer, stream)
    known = {line.place: line for line in lines}
    for place in filter(None, found):
        if place not in known:
            lines.append(known.setdefault(place, CodeLine(place)))
        known[place].host_reads = -(-found[place] // UPDATES)


def _cpu_shares(operations: Iterable[TimedOperation], whole_ms: float, waiting: float) -> dict[str, float]:
    """The share of a CPU's time in operations, and between them, which is Python's and torch's dispatcher's."""
    computing = min(1.0, sum(o.ms + o.backward_ms for o in operations if o.phase != "data") / whole_ms)
    return {"in operations": computing, "between operations (Python, dispatch)": max(0.0, 1 - computing - waiting)}


MIN_READING = 0.1  # of an update's time spent waiting for data: then the lines are looked for that read it in other processes


@dataclass(kw_only=True)
class StepProfile(Looked):
    """The parts of a step's time, and what it is measured by."""

    evaluation_s: float
    saving_s: float | None  # of one checkpoint; None where the run saves none
    updates: int  # in an epoch
    run_updates: int  # in the whole run
    bandwidth: float  # bytes a second, read and written by a copy
    step_flops: float  # of forward and backward of an update; 0 where torch cannot count them
    micro_batch: int
    device: str
    start_s: float  # until the run is built


def profile_step(trainer: Trainer, profile_s: float, asked: float | None = None) -> StepProfile:
    """Run updates of a built trainer, for `profile_s` seconds in each of several kinds of profile.

    It was `asked` for at this time.monotonic(), before the trainer was built.
    """
    start_s, run_updates = time.monotonic() - (asked or time.monotonic()), trainer.max_updates
    trainer.endless()
    trainer.model.train()
    trainer.callbacks.start()
    trainer.log.writers = [trainer.callbacks]
    stream = TrackedStream(trainer.read())
    for _ in range(trainer.timer.warmup + WARMUP_UPDATES):
        update(trainer, stream)
    for micro in (short := short_updates(trainer)):
        update(trainer, chain([micro], short))
    found = look(trainer, stream, profile_s)
    if found.rest.get(WAITING, 0.0) > MIN_READING and not any(line.reads_data for line in found.lines):
        read = found.with_reading(reading_lines(trainer, profile_s))
        found.lines, found.rest = read.lines, read.rest
    batches = list(one_update(stream))
    samples = trees.length(batches[-1].x)
    return StepProfile(
        **vars(found),
        evaluation_s=_evaluation_s(trainer),
        saving_s=_saving_s(trainer),
        updates=trainer.batch.updates(trainer.batch.order.length, 0, trainer.drop_last),
        run_updates=run_updates,
        bandwidth=bandwidth(trainer.device),
        step_flops=len(batches) * samples * (trainer.log.mfu.model.per_sample or 0.0),
        micro_batch=samples,
        device=trainer.device.type,
        start_s=start_s,
    )


def _evaluation_s(trainer: Trainer) -> float:
    """Seconds of one evaluation, extrapolated from its first batches."""
    world, sets = trainer.parallel.data_world, trainer.evaluator.sets[trainer.evaluator.set].values()
    batches = max(len(trainer.batch.evaluation(pipeline.source, world)) for pipeline in sets)
    trainer.evaluator.max_batches = min(batches, trainer.evaluator.max_batches or batches, 8)
    synchronize(trainer.device)
    return own_seconds(trainer.evaluator.metrics) * batches / max(1, trainer.evaluator.max_batches)


def _saving_s(trainer: Trainer) -> float | None:
    """Seconds of saving one checkpoint."""
    if not trainer.saving.active:
        return None
    synchronize(trainer.device)
    with tempfile.TemporaryDirectory(dir=trainer.run_dir) as folder:
        return own_seconds(lambda: checkpoint_io.save(Path(folder), 0, trainer.model.state_dict(), trainer.state()))

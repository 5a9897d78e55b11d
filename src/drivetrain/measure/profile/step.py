"""The profile of a run's step: where its time goes, which of the user's own lines take it, and what it is measured by."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from drivetrain.core.errors import Diverged
from drivetrain.core.machine.device import clock_for, synchronize
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import MicroBatch, one_update
from drivetrain.debug.profile import silence_profiler
from drivetrain.debug.torch_modes import waiting_calls
from drivetrain.engine.callbacks import CallbackStep
from drivetrain.engine.flops import measured
from drivetrain.engine.step import PlainStep
from drivetrain.engine.trainer import Trainer
from drivetrain.engine.update_step import UpdateStep
from drivetrain.measure import intervals
from drivetrain.measure.benchmark.interleave import WARMUP_UPDATES, short_updates
from drivetrain.measure.forecast.roofline import bandwidth
from drivetrain.measure.profile.attribution import WAITING, Attribution, CodeLine, attribute, together
from drivetrain.measure.profile.operations import OperationRecorder, TimedOperation
from drivetrain.measure.profile.sampler import Clocks, Samples, Spent, ThreadClock, own_seconds, sampled, thread_clock
from drivetrain.measure.profile.user_code import user_line
from drivetrain.saving import checkpoint_io

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
        """The step with its phases told apart; one that is wrapped otherwise, such as by one graph, is a phase as it is."""
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

    The machine's speed changes, so that each look is one of several, and the intervals are told by their spread.
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


END = "drivetrain: end"
IDLE = "the device is idle"
PROFILED = 5  # updates
SYNCHRONIZING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def device_shares(trainer: Trainer, stream: TrackedStream) -> dict[str, float]:
    """Shares of an update's time: an accelerator's own of kernels and copies, and the host's that waits for it.

    Empty where the profiler sees nothing of the device.
    """
    silence_profiler()
    # The host, and the device where the profiler knows its type: CUDA, XPU; not MPS.
    of_device = getattr(ProfilerActivity, trainer.device.type.upper(), ProfilerActivity.CPU)
    with profile(activities=[*{ProfilerActivity.CPU, of_device}]) as profiler:
        began = time.perf_counter()
        for _ in range(PROFILED):
            update(trainer, stream)
        with record_function(END):
            synchronize(trainer.device)
        whole_us = 1e6 * (time.perf_counter() - began)
    return _device_shares(profiler.events() or [], whole_us)


def _device_shares(events: Iterable[FunctionEvent], whole_us: float) -> dict[str, float]:
    on_host = [e for e in events if e.device_type == DeviceType.CPU]
    # A named range of the host, such as torch's own of the optimizer, is repeated on the device, with the gaps in it.
    on_device = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
    if not on_device:
        return {}
    copies = [e for e in on_device if e.name.startswith("Memcpy")]
    end = next(e.time_range.start for e in on_host if e.name == END)  # the profile's own synchronization comes after it
    waits = sum(e.time_range.end - e.time_range.start for e in on_host if e.name in SYNCHRONIZING and e.time_range.end < end)
    return {
        "the device computes": _union_us(e for e in on_device if not e.name.startswith("Memcpy")) / whole_us,
        "the device copies": _union_us(copies) / whole_us,
        IDLE: max(0.0, whole_us - _union_us(on_device)) / whole_us,
        "the host waits for the device": waits / whole_us,
    }


def _union_us(events: Iterable[FunctionEvent]) -> float:
    """Microseconds in which at least one of the events runs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((e.time_range.start, e.time_range.end) for e in events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total

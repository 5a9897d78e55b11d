"""Profiles a run's step: where its time goes, and which of the user's own lines take it."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from drivetrain.core import trees
from drivetrain.core.device import synchronize
from drivetrain.core.errors import Diverged
from drivetrain.core.limits import usable_cores
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.torch_patches import threads_set_by
from drivetrain.core.trees import Tree
from drivetrain.debug.profile import silence_profiler
from drivetrain.debug.torch_modes import waiting_calls
from drivetrain.engine.callbacks import CallbackStep
from drivetrain.engine.step import PlainStep
from drivetrain.engine.trainer import Trainer
from drivetrain.engine.update_step import UpdateStep
from drivetrain.measure import intervals
from drivetrain.measure.benchmark.interleave import WARMUP_UPDATES
from drivetrain.measure.forecast.replay import number_format, this_device
from drivetrain.measure.intervals import MIN_PAIRS
from drivetrain.measure.profile.sampler import (
    WAITING,
    Attribution,
    Line,
    Operation,
    Recorder,
    Sampler,
    Samples,
    Times,
    attribute,
    operation_clock,
    thread_clock,
    together,
    user_line,
)
from drivetrain.saving import checkpoint_io

UPDATES = 3  # in which what reads a value back from the device is counted
LOOKS = 8  # in turns, in each of which an update is looked at in every way: their spread is that of the figures
MAX_SLOWER = 4  # times the wanted seconds, where other work has the cores


class TrackedStream:
    """The training stream. `phase` says what runs: "data" while it is read, then "micro_batch", then "update"."""

    def __init__(self, stream: Iterator[MicroBatch]) -> None:
        self._stream, self.phase = stream, "micro_batch"

    def __iter__(self) -> TrackedStream:
        return self

    def __next__(self) -> MicroBatch:
        self.phase = "data"
        try:
            with record_function(READING):
                return next(self._stream)
        finally:
            self.phase = "micro_batch"


def update(trainer: Trainer, stream: Iterable[MicroBatch]) -> None:
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


def read_update(stream: TrackedStream) -> tuple[MicroBatch, int]:
    """Read the micro-batches of one update; return the last one and how many there are."""
    for count, micro in enumerate(stream, 1):
        if micro.last:
            return micro, count
    raise RuntimeError("the data ended")


@dataclass
class Looked:
    """The findings of several looks at updates; milliseconds are those of one update, without those that waited for a core."""

    lines: list[Line]
    rest: dict[str, float]  # shares of a step's time that no line of the user's called, by what they are
    operations: int  # in an update
    step_ms: float  # as it is, unwatched
    phases: dict[str, float]  # ms by phase; the device is synchronized after each
    read_ms: float | None  # of reading one micro-batch
    queued: float  # the share of the unwatched time in which the step waited for a core that other programs had


def look(trainer: Trainer, stream: TrackedStream, profile_s: float, busy: float = 0.0) -> Looked:
    """Look at updates in turns: as they are, sampled, by their phases, and with each operation recorded.

    The machine's speed changes, so that each look is one of several, and the interval of a line's share is told by their spread.
    `busy` is the share of the time in which an accelerator works.
    """
    clock, block_s = thread_clock(), profile_s / LOOKS
    helpers = trainer.device.type != "cpu" or threading.active_count() > 1  # threads of the backward, or of the loader
    phases = _Phases(trainer, stream, clock)
    micro, _ = read_update(stream)
    small_size = sum(t.numel() for t in trees.leaves(micro.x)) // 16
    plain, watched, own, wall = 0, 0, 0.0, 0.0
    samples: list[Samples] = []
    recorded: list[Operation] = []
    looks: list[Attribution] = []

    def block(once: Callable[[], None], own_s: Callable[[], float]) -> int:
        count, began = 0, time.perf_counter()
        # On a busy machine it takes longer until as much of the run was seen.
        while not count or (own_s() < block_s and time.perf_counter() - began < MAX_SLOWER * block_s):
            once()
            count += 1
        synchronize(trainer.device)
        return count

    for _ in range(LOOKS):
        synchronize(trainer.device)
        began = clock()
        plain += block(lambda: update(trainer, stream), partial(_own_since, clock, began))
        took = clock() - began
        own, wall = own + took.own, wall + took.wall
        sampler = Sampler(lambda: stream.phase, update.__code__, helpers)
        with sampler.watching() as own_s:
            seen = block(lambda: update(trainer, stream), own_s)
        block(phases.update, partial(_own_since, clock, clock()))
        recorder = Recorder(lambda: stream.phase, operation_clock(trainer.device), update.__code__, small_size)
        with recorder.recording():
            update(trainer, stream)
        looks.append(attribute(sampler.spent, recorder.operations, 1, busy, seen))
        samples.append(sampler.spent)
        watched, recorded = watched + seen, recorded + recorder.operations
    found = attribute(together(samples), recorded, LOOKS, busy, watched).seen_in(looks)
    found.note_host_reads(_host_reads(trainer, stream))
    operations = sum(1 + o.backward_operations for o in recorded if o.phase != "data") // LOOKS
    read_ms = 1e3 * statistics.fmean(phases.read_s) if phases.read_s else None
    return Looked(found.lines, found.rest, operations, 1e3 * own / plain, phases.ms, read_ms, max(0.0, 1 - own / wall))


def _own_since(clock: Callable[[], Times], began: Times) -> float:
    return (clock() - began).own


def reading_lines(trainer: Trainer, seconds: float) -> Samples:
    """Read batches in this process, and sample it: the loader's own processes cannot be watched."""
    sampler = Sampler(lambda: "data", reading_lines.__code__, threading.active_count() > 1)
    until = time.perf_counter() + seconds
    with sampler.watching():
        for request in trainer.requests():
            trainer.train_data(request)
            if time.perf_counter() > until:
                break
    return sampler.spent


def _host_reads(trainer: Trainer, stream: TrackedStream) -> dict[str, int]:
    """The number of times in an update that each user line makes the host wait for the device, or would on CUDA."""
    found: Counter[str] = Counter()

    def count(_: str) -> None:
        place = user_line(sys._getframe(1), update.__code__)
        if place is not None and stream.phase != "data":
            found[place] += 1

    with waiting_calls(count):
        for _ in range(UPDATES):
            update(trainer, stream)
    return {place: -(-count // UPDATES) for place, count in found.items()}


READING, END = "drivetrain: reading", "drivetrain: end"
IDLE = "the device is idle"
PROFILED = 5  # updates
SYNCHRONIZING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def time_shares(trainer: Trainer, stream: TrackedStream) -> dict[str, float]:
    """Shares of an update's time; empty where the profiler sees nothing of the device.

    On an accelerator these are the device's own times of kernels and copies, and beside them the host's time waiting for it.
    On a CPU it is the time in operations, and the time between them, which is Python's and torch's dispatcher's.
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
    events = profiler.events() or []
    return _cpu_shares(events, whole_us) if trainer.device.type == "cpu" else _device_shares(events, whole_us)


def _cpu_shares(events: Iterable[FunctionEvent], whole_us: float) -> dict[str, float]:
    outermost = [e for e in events if e.cpu_parent is None]
    own_threads = {e.thread for e in outermost if e.name == READING}  # excludes the loader's threads
    reading = _union_us(e for e in outermost if e.name == READING)
    computing = _union_us(e for e in outermost if e.name not in (READING, END) and e.thread in own_threads)
    if not computing:
        return {}
    between = max(0.0, whole_us - reading - computing)
    return {"in operations": computing / whole_us, "between operations (Python, dispatch)": between / whole_us}


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


class Threads(NamedTuple):
    """The threads that torch computes with."""

    number: int
    cores: int
    share: float = 0.0  # of an update's time that is gained with one thread for each core
    certain: float = 0.0  # the part of it that is certain
    place: str | None = None  # file:line of the user's own that sets their number in the step


def measure_threads(update: Callable[[], None], seconds: float) -> Threads:
    """Run updates as they are and, where they leave cores unused, in turns with a thread for each core."""
    place: list[str] = []
    with threads_set_by(lambda number: place.append(user_line(sys._getframe(1)) or "")):
        update()
    update()  # as it is: it may set the number itself
    number, cores = torch.get_num_threads(), usable_cores()
    if number >= cores:
        return Threads(number, cores)
    as_is: list[float] = []
    with_all: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(as_is) < MIN_PAIRS:
        torch.set_num_threads(number)
        as_is.append(_seconds(update))
        torch.set_num_threads(cores)
        with threads_set_by(lambda _: None):
            with_all.append(_seconds(update))
    torch.set_num_threads(number)
    ratio = intervals.ratio(with_all, as_is)
    return Threads(number, cores, max(0.0, 1 - ratio.middle), max(0.0, 1 - ratio.high), next(filter(None, place), None))


def _seconds(update: Callable[[], None]) -> float:
    update()  # the first one starts the threads
    began = time.perf_counter()
    update()
    return time.perf_counter() - began


MIN_READING = 0.1  # of an update's time spent waiting for data: then the lines are looked for that read it in other processes


class Roofline(NamedTuple):
    """The device's limits, and the work of one update."""

    flops: float  # a second, of a large matrix product in the step's number format
    bandwidth: float  # bytes a second, read and written by a copy
    step_flops: float  # of forward and backward; 0 where torch cannot count them


@dataclass(kw_only=True)
class StepProfile(Looked):
    """The parts of a step's time, and what it is measured by."""

    evaluation_s: float
    saving_s: float | None  # of one checkpoint; None where the run saves none
    updates: int  # in an epoch
    run_updates: int  # in the whole run
    larger_batch: float | None  # samples a second with four times the micro-batch, relative to one
    roofline: Roofline
    micro_batch: int
    device: str
    utilization: dict[str, float]  # shares of an update's time
    threads: Threads | None  # of a CPU
    start_s: float = 0.0  # until the run is built


def profile_step(trainer: Trainer, profile_s: float) -> StepProfile:
    """Run updates of a built trainer, for `profile_s` seconds in each of several kinds of profile."""
    run_updates = trainer.max_updates
    trainer.endless()
    trainer.model.train()
    trainer.callbacks.start()
    trainer.log.writers = [trainer.callbacks]
    stream = TrackedStream(trainer.read())
    for _ in range(trainer.timer.warmup + WARMUP_UPDATES):
        update(trainer, stream)
    shares = time_shares(trainer, stream)
    found = look(trainer, stream, profile_s, 1 - shares.get(IDLE, 1.0))
    if found.rest.get(WAITING, 0.0) > MIN_READING and not any(line.reads_data for line in found.lines):
        read = Attribution(found.lines, found.rest).with_reading(reading_lines(trainer, profile_s))
        found.lines, found.rest = read.lines, read.rest
    used = measure_threads(lambda: update(trainer, stream), profile_s) if trainer.device.type == "cpu" else None
    micro, micro_batches = read_update(stream)
    return StepProfile(
        **vars(found),
        larger_batch=_larger_batch(trainer, micro, profile_s),
        evaluation_s=_evaluation_s(trainer),
        saving_s=_saving_s(trainer),
        updates=trainer.batch.updates(trainer.batch.order.length, 0, trainer.drop_last),
        run_updates=run_updates,
        roofline=_roofline(trainer, micro_batches * trees.length(micro.x)),
        micro_batch=trees.length(micro.x),
        device=trainer.device.type,
        utilization=shares,
        threads=used,
    )


REST = "schedule, records and callbacks"
P = ParamSpec("P")
T = TypeVar("T")


class _Phases:
    """Times the phases of updates, and the rest of them. The device is synchronized after each phase."""

    def __init__(self, trainer: Trainer, stream: TrackedStream, clock: Callable[[], Times]) -> None:
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._clock, self._count, self._device = clock, 0, trainer.device
        self._whole, self._stream = 0.0, self._reads(stream)
        self.read_s: list[float] = []
        step = self._apart(trainer.step)
        self._trainer: Any
        self._trainer = copy(trainer)
        self._trainer.ema = SimpleNamespace(update=self._timed("update", trainer.ema.update))
        self._trainer.step = SimpleNamespace(
            micro_batch=step.micro_batch,
            update=self._timed("update", step.update),
            zero_grad=self._timed("update", step.zero_grad),
        )

    def _apart(self, step: Any) -> Any:
        """The step with its phases told apart; one that is wrapped otherwise, such as by one graph, is a phase as it is."""
        if type(step) is CallbackStep:
            return dataclasses.replace(step, inner=self._apart(step.inner))
        if type(step) is UpdateStep:
            return dataclasses.replace(step, inner=self._apart(step.inner), waiting=[])
        if not isinstance(step, PlainStep):
            given = {name: getattr(step, name) for name in ("update", "zero_grad")}
            return SimpleNamespace(micro_batch=self._timed("step", step.micro_batch), **given)
        timed, plain = self._timed, step

        class Loss:
            step = staticmethod(timed("loss", plain.loss.step))

        class Precision:
            autocast, step = staticmethod(plain.precision.autocast), staticmethod(plain.precision.step)
            backward = staticmethod(timed("backward", plain.precision.backward))

        return dataclasses.replace(step, forward=timed("forward", step.forward), loss=Loss(), precision=Precision())

    def _timed(self, phase: str, call: Callable[P, T]) -> Callable[P, T]:
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            began = self._clock()
            result = call(*args, **kwargs)
            synchronize(self._device)
            self._spent[phase] += _own_since(self._clock, began)
            return result

        return run

    def _reads(self, stream: TrackedStream) -> Iterator[MicroBatch]:
        read = self._timed("data wait", lambda: next(stream))
        while True:
            micro = read()
            if micro.seconds is not None:
                self.read_s.append(micro.seconds)
            yield micro

    def update(self) -> None:
        """Run one update."""
        began = self._clock()
        update(self._trainer, self._stream)
        self._whole += _own_since(self._clock, began)
        self._count += 1

    @property
    def ms(self) -> dict[str, float]:
        """Milliseconds of an update by phase, whose sum is the whole update."""
        spent = dict(self._spent)
        if "loss" in spent:  # which runs the forward
            spent["loss"] -= spent["forward"]
        spent[REST] = max(0.0, self._whole - sum(spent.values()))
        return {phase: 1e3 * seconds / self._count for phase, seconds in spent.items()}


def _larger_batch(trainer: Trainer, micro: MicroBatch, profile_s: float) -> float | None:
    """Samples a second of forward and backward with four times the micro-batch, relative to one: the median of pairs.

    None where four times the micro-batch does not fit.
    """

    step = trainer.step.with_forward(trainer.evaluator.forward)  # not compiled: a compiler would compile for the larger batch too
    loss_sum = torch.zeros((), device=trainer.device)

    def seconds(x: Tree, y: Tree) -> float:
        began = time.perf_counter()
        step.micro_batch(dataclasses.replace(micro, x=x, y=y), loss_sum)
        step.zero_grad()
        synchronize(trainer.device)
        return time.perf_counter() - began

    try:
        batches = [tuple(trees.concatenate([t] * times) for t in (micro.x, micro.y)) for times in (1, 4)]
        ratios: list[float] = []
        until = time.perf_counter() + profile_s
        while time.perf_counter() < until or len(ratios) <= UPDATES:
            one, four = (seconds(*batch) for batch in batches)
            ratios.append(4 * one / four)
        return statistics.median(ratios[1:])  # the first pair is the warm-up
    except (RuntimeError, TypeError):
        return None


def _roofline(trainer: Trainer, samples: int) -> Roofline:
    """The limits of this machine, as the forecast knows it, and the operations of an update of `samples`."""
    number = number_format(trainer.precision.dtype or "float32", bool(getattr(trainer.precision, "matmul", "")))
    device = this_device(trainer.device, (number,))
    return Roofline(device.flops[number], device.bandwidth, samples * (trainer.log.mfu.model.per_sample or 0.0))


def _evaluation_s(trainer: Trainer) -> float:
    """Seconds of one evaluation, extrapolated from its first batches."""
    world, sets = trainer.parallel.data_world, trainer.evaluator.sets[trainer.evaluator.set].values()
    batches = max(len(trainer.batch.evaluation(pipeline.source, world)) for pipeline in sets)
    trainer.evaluator.max_batches = min(batches, trainer.evaluator.max_batches or batches, 8)
    synchronize(trainer.device)
    clock = thread_clock()
    began = clock()
    trainer.evaluator.metrics()
    return _own_since(clock, began) * batches / max(1, trainer.evaluator.max_batches)


def _saving_s(trainer: Trainer) -> float | None:
    """Seconds of saving one checkpoint."""
    if not trainer.saving.active:
        return None
    synchronize(trainer.device)
    with tempfile.TemporaryDirectory(dir=trainer.run_dir) as folder:
        clock = thread_clock()
        began = clock()
        checkpoint_io.save(Path(folder), 0, trainer.model.state_dict(), trainer.state())
        return _own_since(clock, began)

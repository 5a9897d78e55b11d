"""Interleaved benchmarks: each variant is a live process, and only one of them runs at any time.

A machine's speed drifts by more than most techniques gain, so no variant runs alone for long. In each round the variants run
short timed blocks in the order A B C C B A, and ratios are taken within a round. A variant that waits has nothing under way on
its device, and is stopped as a whole (SIGSTOP to its process group, with its workers and ranks), so that it neither prefetches
nor spins while another one is timed. It keeps its memory: where not all variants fit, a round runs them in groups, each with
the first variant. Each round starts fresh processes, because two processes of the same variant differ by 2 % or more for as
long as they live (memory layout and the like): rounds in one pair of processes would agree with each other, and be wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain.compile.base import compiled_anew
from drivetrain.core.lazy import torch
from drivetrain.core.machine import process
from drivetrain.core.machine.device import Clock, Mark, clock_for, peak_memory, synchronize
from drivetrain.core.machine.forking import ForkedProcess
from drivetrain.core.options import stages
from drivetrain.core.step import trees
from drivetrain.core.step.step import Stream
from drivetrain.core.typed import JsonObject
from drivetrain.core.world import World
from drivetrain.launch.job import Job
from drivetrain.loader.device import free_memory
from drivetrain.run import environment
from drivetrain.run.result import Result
from drivetrain.sweeps.launchers import capture, run_job
from drivetrain.sweeps.store import StoredJob, SweepJob

if TYPE_CHECKING:
    from drivetrain.core.step.microbatch import MicroBatch
    from drivetrain.engine.trainer import Trainer

WARMUP_UPDATES = 3  # beyond those that a run itself counts as its warm-up
DIGESTED = 4096  # elements of each parameter
LEAD = 0.15  # share of a block that runs untimed before it: prefetched batches are used up and caches are warm again
MARGIN = 1.2  # of memory: a variant may need more than the measured ones
CONTEXT = 2**30  # bytes of a process on an accelerator beyond its tensors: driver, kernels, libraries
WATCHDOG_S = 0.5  # within which the watchdog of NCCL has seen that a collective is done; else a pause would count as its time


@dataclass
class TimedBlock:
    """Measurements of one timed block of updates, or of a variant's blocks of one round together."""

    seconds: float
    updates: int
    samples: int
    data_wait_s: float  # seconds in which the device waited for data
    step_s: list[float]  # seconds of each update
    peak_memory: int  # bytes, since the process started

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds

    def scaled(self, factor: float) -> TimedBlock:
        """Return the block as if it had `factor` times the updates; the times of single updates are those that were measured."""
        return replace(
            self,
            seconds=factor * self.seconds,
            updates=round(factor * self.updates),
            samples=round(factor * self.samples),
            data_wait_s=factor * self.data_wait_s,
        )

    def __add__(self, other: TimedBlock) -> TimedBlock:
        return TimedBlock(
            self.seconds + other.seconds,
            self.updates + other.updates,
            self.samples + other.samples,
            self.data_wait_s + other.data_wait_s,
            self.step_s + other.step_s,
            max(self.peak_memory, other.peak_memory),
        )


@dataclass
class Times:
    """Marks of updates and of waits for data, to be read after the last update."""

    clock: Clock
    updates: list[tuple[Mark, Mark]] = field(default_factory=list)
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    samples: int = 0  # of this rank

    def step_s(self) -> list[float]:
        """Return the seconds of each update. Waits for the device."""
        return [self.clock.seconds(*marks) for marks in self.updates]


class BenchmarkAgent:
    """Wraps the training stream on every rank. The ranks run equal numbers of updates, and pause between them together.

    A paused rank waits at a pipe: on the device nothing of it runs, and none of its collectives is under way. So it may stand
    still for longer than a collective may take.
    """

    def __init__(self, connection: Connection, ranks: int) -> None:
        self._connection = connection  # to the benchmark, from rank 0
        # From rank 0 to each other rank, and back. The ranks are forked from this process, so all have them.
        self._pipes = [multiprocessing.Pipe() for _ in range(ranks - 1)]
        self._started = False

    def attach(self, trainer: Trainer) -> None:
        """Wrap a finished trainer's stream, and let the run continue without end."""
        trainer.endless()
        trainer.stream_watchers.append(lambda stream: self._serve(stream, trainer))

    def _serve(self, stream: Stream, trainer: Trainer) -> Stream:
        """Warm up and report; then time a block of as many updates as each message asks for."""
        if self._started:  # the trainer starts again with a micro-batch half as large, which is another variant
            raise RuntimeError("out of memory")
        self._started = True
        clock = clock_for(trainer.device)
        times = Times(clock)
        yield from _updates(stream, trainer.timer.warmup + WARMUP_UPDATES, times)
        weights = trainer.progress.updates, _digest(trainer.model)
        yield from short_updates(trainer)
        synchronize(trainer.device)
        report: JsonObject | TimedBlock = _facts(trainer, time.monotonic() - process.started, times) | {"weights": weights}
        while True:
            updates = self._pause(trainer, report)
            yield from _updates(stream, max(1, round(LEAD * updates)), Times(clock))
            synchronize(trainer.device)
            times, began = Times(clock), time.perf_counter()
            yield from _updates(stream, updates, times)
            synchronize(trainer.device)
            seconds = time.perf_counter() - began
            samples = times.samples * trainer.parallel.data_world.size
            report = TimedBlock(
                seconds, updates, samples, clock.total(times.waits), times.step_s(), peak_memory(trainer.device)
            )  # fmt: skip

    def _pause(self, trainer: Trainer, report: JsonObject | TimedBlock) -> int:
        """Wait until every rank stands still, send rank 0's report, and return the number of updates of the next block."""
        trainer.parallel.finish_collectives()
        if self._pipes and trainer.device.type != "cpu":
            time.sleep(WATCHDOG_S)
        if trainer.parallel.world.rank:
            _, to_first = self._pipes[trainer.parallel.world.rank - 1]
            to_first.send(None)
            return int(to_first.recv())
        for other, _ in self._pipes:
            other.recv()
        self._connection.send(report)
        updates: int = self._connection.recv()
        for other, _ in self._pipes:
            other.send(updates)
        return updates


def _digest(model: torch.nn.Module) -> str:
    """The SHA-256 of what this rank has of the parameters: the first elements of each."""
    read = hashlib.sha256()
    for name, p in model.named_parameters():
        local: torch.Tensor = p.to_local() if hasattr(p, "to_local") else p
        read.update(name.encode())
        read.update(local.detach().contiguous().flatten()[:DIGESTED].cpu().view(torch.uint8).numpy().tobytes())
    return read.hexdigest()


def short_updates(trainer: Trainer) -> Stream:
    """Yield the epoch's last update as often as a warm-up needs, where it is short: it has micro-batches of other shapes.

    What is compiled for a shape, or recorded, would be so within a timed block otherwise.
    """
    batch, epoch, world = trainer.batch, trainer.progress.epoch, trainer.parallel.data_world
    updates = batch.updates(batch.order.length, epoch, trainer.drop_last)
    if updates * batch.size(epoch) > batch.order.length:
        requests = list(batch.requests(trainer.seed, epoch, world, trainer.drop_last, updates - 1))
        again = [replace(request, epoch_end=False) for request in requests]
        yield from trainer.read(again * (trainer.timer.warmup + WARMUP_UPDATES))


def _facts(trainer: Trainer, elapsed_s: float, times: Times) -> JsonObject:
    """The facts that a variant reports of itself after the warm-up, that many seconds after its start."""
    steps = times.step_s()
    step_s = statistics.median(steps[trainer.timer.warmup :])
    return {
        "start_s": max(0.0, elapsed_s - len(steps) * step_s),  # all that the warm-up's updates at their pace are not
        "step_s": step_s,
        "compile_s": trainer.compile_seconds(),
        "compiled_anew": compiled_anew(),
        "device": environment.device_name(trainer.device),
        "device_type": trainer.device.type,
        "global_batch": trainer.batch.size(0),
        "samples": len(trainer.train_data.source),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "notice": trainer.precision.notice(),
        "memory": read_memory(trainer.device, trainer.parallel.world),
    }


def _updates(stream: Iterator[MicroBatch], count: int, times: Times) -> Iterator[MicroBatch]:
    """Yield the micro-batches of `count` whole updates, and mark them in `times`."""
    mark = times.clock.mark
    start = mark()
    while count:
        asked = mark()
        micro = next(stream)
        times.waits.append((asked, mark()))
        times.samples += trees.length(micro.x)
        last = micro.last
        yield micro
        if last:  # control returns when the trainer asks for the next micro-batch: the update has been queued
            count -= 1
            end = mark()
            times.updates.append((start, end))
            start = end


class DeviceMemory(NamedTuple):
    """The memory of a variant's device after the variant's warm-up, in bytes."""

    used: int  # by the variant
    free: int | None  # None where the device does not report it


def read_memory(device: torch.device, world: World) -> DeviceMemory:
    """Read the memory of rank 0's device; on a CPU all ranks of this machine share it."""
    if device.type == "cpu":
        return DeviceMemory(world.local_size * peak_memory(device), free_memory(device))
    module = torch.get_device_module(device)
    reserved = getattr(module, "max_memory_reserved", None) or module.driver_allocated_memory  # MPS has the latter
    return DeviceMemory(int(reserved()) + CONTEXT, free_memory(device))


def fits(need: int | None, live: Sequence[DeviceMemory]) -> bool:
    """True if a variant fits into memory with the live ones, the newest last. `need`: its own memory, if it has run already."""
    if not live or live[-1].free is None:
        return True
    return MARGIN * (need or max(reading.used for reading in live)) <= live[-1].free


def ran_out(reason: str) -> bool:
    """True if a variant's error is want of memory: torch's own words, and those of cuBLAS and cuDNN."""
    return any(words in reason for words in ("out of memory", "ALLOC_FAILED", "can't allocate memory"))


TIMEOUT_S = 900.0  # for a variant's warm-up, and for a block


class VariantEnded(Exception):
    """A variant's process has ended or does not answer; the message says why."""


@dataclass(eq=False)
class Variant:
    """One job of a benchmark, in its own live process."""

    label: str
    job: Job
    run_dir: Path
    facts: JsonObject = field(default_factory=dict)  # as its first process reported them after the warm-up
    starts: list[float] = field(default_factory=list)  # seconds of each round's start, beyond the updates in it
    blocks: list[TimedBlock] = field(default_factory=list)  # one for each round
    updates_per_block: int = 1
    memory: DeviceMemory | None = None  # after its newest process's warm-up
    error: str | None = None
    stopped_after: int | None = None  # rounds, where the stopping rule ended the variant
    _process: Any = None

    def start(self, round_: int, block_s: float) -> None:
        """Fork the process, and wait until it has been built and is warm. The calling process must not have used CUDA.

        Sets how many updates fill a block. Raises VariantEnded.
        """
        self._round_dir = self.run_dir / str(round_)
        self._connection, child_end = multiprocessing.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        shutil.rmtree(self._round_dir, ignore_errors=True)  # of a start that ran out of memory
        self._round_dir.mkdir(parents=True)
        process: Any = ForkedProcess(target=_child, args=(self.job, self._round_dir, child_end, self._connection))
        try:
            process.start()
        finally:
            if process.pid is not None:  # also where a signal has come just now
                self._process = process
        with contextlib.suppress(OSError):
            os.setpgid(process.pid, process.pid)  # the child does the same: whichever comes first
        child_end.close()
        facts = self._receive()
        self.memory = facts.pop("memory")
        self.starts.append(facts.pop("start_s"))
        self.facts = self.facts or facts
        self.updates_per_block = max(1, round(block_s / facts["step_s"]))
        self._signal(signal.SIGSTOP)

    def timed_block(self) -> TimedBlock:
        """Run one timed block while all other variants are stopped. Raises VariantEnded."""
        self._signal(signal.SIGCONT)
        block: TimedBlock = self._receive(self.updates_per_block)
        self._signal(signal.SIGSTOP)
        return block

    def kill(self) -> None:
        """Kill the process, whatever it is doing, and do not wait for its end."""
        if self._process is not None and self._process.is_alive():
            self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        if self._process is not None:
            self._process.join()
            self._process = None

    def _receive(self, question: int | None = None) -> Any:
        try:
            if question is not None:
                self._connection.send(question)
            if not self._connection.poll(TIMEOUT_S):
                raise VariantEnded(f"it did not answer for {TIMEOUT_S:.0f} s")
            return self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            result = Result.read(self._round_dir)
            raise VariantEnded((result and result.error) or f"its process ended with code {self._process.exitcode}") from None

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:  # one that was forked just now has no group yet
                os.kill(self._process.pid, number)


@dataclass(eq=False)
class StagedVariant(Variant):
    """A job with stages: each stage is a separate live process, and a block is made of theirs by their shares of the run."""

    _variants: list[tuple[Variant, float]] = field(default_factory=list)  # and the share of the run's updates

    def __post_init__(self) -> None:
        for number, (run, share) in enumerate(stages.alone(self.job.run)):
            job = replace(self.job, run=run)
            self._variants.append((Variant(self.label, job, self.run_dir / f"stage-{number}"), share))

    def start(self, round_: int, block_s: float) -> None:
        """Start the stages one after another, so that none slows down the start of another."""
        for variant, share in self._variants:
            variant.start(round_, block_s * share)
        (first, _), *others = self._variants
        # The run builds its later stages in memory: of their starts it has the compiling alone.
        self.starts.append(first.starts[-1] + sum(variant.facts["compile_s"] or 0.0 for variant, _ in others))
        readings = [variant.memory for variant, _ in self._variants if variant.memory is not None]
        self.memory = max(readings, key=lambda reading: reading.used, default=None)
        self.facts = self.facts or max(
            (variant.facts for variant, _ in self._variants), key=lambda facts: facts["compile_s"] or 0.0
        )

    def timed_block(self) -> TimedBlock:
        """Run a block of each stage. Times are scaled, so that each stage has its share of the updates."""
        blocks = [(variant.timed_block(), share) for variant, share in self._variants]
        updates = sum(block.updates for block, _ in blocks)
        first, *others = (block.scaled(share * updates / block.updates) for block, share in blocks)
        return sum(others, first)

    def stop(self) -> None:
        for variant, _ in self._variants:
            variant.stop()


def _child(job: Job, run_dir: Path, connection: Connection, parent_end: Connection) -> None:
    """The variant's process: an ordinary job whose output goes to a file."""
    os.setpgid(0, 0)
    parent_end.close()  # else this process would never notice that the parent is gone
    job.attach = BenchmarkAgent(connection, job.run.parallel.ranks()).attach
    entry = StoredJob(0, SweepJob("", job.composed.overrides, job), run_dir)
    capture(entry)
    os._exit(run_job(entry, quiet=True))


def run_rounds(
    variants: Sequence[Variant],
    rounds: int,
    block_s: float,
    progress: Callable[..., None] = lambda *_: None,
    stopped: Callable[[Sequence[Variant]], Iterable[Variant]] = lambda live: (),
) -> None:
    """Run up to `rounds` rounds: two timed blocks of about `block_s` seconds for each variant, each round.

    A variant that fails gets its `error` and runs no further rounds; neither does one that `stopped` returns after a round. The
    benchmark ends when only the first variant, the baseline, is left, and when that has failed: without it there are no ratios.
    """
    live, round_s = list(variants), 0.0
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}", round_s * (rounds - number) or None)
        began = time.monotonic()
        _run_round(live, number, block_s)
        round_s = time.monotonic() - began
        if variants[0].error is not None:
            break
        for variant in stopped([variant for variant in live if variant.error is None]):
            variant.stopped_after = number + 1
        live = [variant for variant in live if variant.error is None and variant.stopped_after is None]
        if live == list(variants[:1]) and len(variants) > 1:
            break


def _run_round(variants: Sequence[Variant], number: int, block_s: float) -> None:
    """Run one round of the variants, the baseline first, in as many groups as their memory makes necessary."""
    baseline, waiting = variants[0], deque(variants[1:])
    if number % 2:  # the order alternates, so that it is not always the same variant that runs after the idle time
        waiting.reverse()
    blocks: dict[Variant, TimedBlock] = {}

    def timed_block(variant: Variant) -> None:
        block = variant.timed_block()
        blocks[variant] = blocks[variant] + block if variant in blocks else block

    try:
        _try(baseline, lambda variant: variant.start(number, block_s))
        while baseline.error is None:
            group = _start_group(baseline, waiting, number, block_s)
            order = [*group, baseline] if number % 2 else [baseline, *group]
            for variant in (*order, *reversed(order)):
                _try(variant, timed_block)
            for variant in group:
                variant.stop()
            if not waiting:
                break
    finally:
        for variant in variants:  # all of them, before any is waited for: a second Ctrl-C would leave the others stopped for ever
            variant.kill()
        for variant in variants:
            variant.stop()
    for variant in variants:
        if variant.error is None and baseline.error is None:
            variant.blocks.append(blocks[variant])


def _start_group(baseline: Variant, waiting: deque[Variant], number: int, block_s: float) -> list[Variant]:
    """Start the next variants that fit into memory with the baseline, at least one, and take them from those that wait."""
    group: list[Variant] = []
    while waiting:
        variant = waiting[0]
        live = [a.memory for a in (baseline, *group) if a.memory is not None and a.error is None]
        if group and not fits(variant.memory and variant.memory.used, live):
            break
        _try(variant, lambda variant: variant.start(number, block_s))
        if group and variant.error is not None and ran_out(variant.error):  # it may fit with the baseline alone
            variant.stop()
            variant.error = None
            break
        waiting.popleft()
        group.append(variant)
    return group


def _try(variant: Variant, action: Callable[[Variant], None]) -> None:
    """Act on a variant, unless it has failed; if it fails now, that is its error."""
    if variant.error is None:
        try:
            action(variant)
        except VariantEnded as reason:
            variant.error = str(reason)

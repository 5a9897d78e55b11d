"""The benchmark's side within an arm's process: it gets control between two updates, runs timed blocks and pauses."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from drivetrain.compile.base import compiled_anew
from drivetrain.core import process, trees
from drivetrain.core.clock import Clock, Mark, clock_for
from drivetrain.core.device import peak_memory, synchronize
from drivetrain.core.world import World
from drivetrain.loader.resident import free_memory
from drivetrain.run import environment

WARMUP_UPDATES = 3  # beyond those that a run itself counts as its warm-up
LEAD = 0.15  # share of a block that runs untimed before it: prefetched batches are used up and caches are warm again
MARGIN = 1.2  # of memory: an arm may need more than the measured ones
CONTEXT = 2**30  # bytes of a process on an accelerator beyond its tensors: driver, kernels, libraries
WATCHDOG_S = 0.5  # within which the watchdog of NCCL has seen that a collective is done; else a pause would count as its time


@dataclass
class TimedBlock:
    """Measurements of one timed block of updates, or of an arm's blocks of one round together."""

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
        seconds, updates, samples = factor * self.seconds, round(factor * self.updates), round(factor * self.samples)
        return TimedBlock(seconds, updates, samples, factor * self.data_wait_s, self.step_s, self.peak_memory)

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

    def data_wait_s(self) -> float:
        """Return the seconds in which the device waited for data. Waits for the device."""
        return self.clock.total(self.waits)


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

    def attach(self, trainer: Any) -> None:
        """Wrap a finished trainer's stream, and let the run go on without end."""
        trainer.endless()
        trainer.stream_watchers.append(lambda stream: self._serve(stream, trainer))

    def _serve(self, stream: Iterator[Any], trainer: Any) -> Iterator[Any]:
        """Warm up and report; then time a block of as many updates as each message asks for."""
        if self._started:  # the trainer starts again with a micro-batch half as large, which is another arm
            raise RuntimeError("out of memory")
        self._started = True
        clock = clock_for(trainer.device)
        times = Times(clock)
        yield from _updates(stream, trainer.timer.warmup + WARMUP_UPDATES, times)
        synchronize(trainer.device)
        report: Any = _facts(trainer, time.monotonic() - process.started, times)
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
                seconds, updates, samples, times.data_wait_s(), times.step_s(), peak_memory(trainer.device)
            )  # fmt: skip

    def _pause(self, trainer: Any, report: Any) -> int:
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


def _facts(trainer: Any, elapsed_s: float, times: Times) -> dict[str, Any]:
    """What an arm reports of itself after the warm-up, so many seconds after it began."""
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


def _updates(stream: Iterator[Any], count: int, times: Times) -> Iterator[Any]:
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


class Reading(NamedTuple):
    """The memory of an arm's device after the arm's warm-up, in bytes."""

    used: int  # by the arm
    free: int | None  # None where the device does not say


def read_memory(device: Any, world: World) -> Reading:
    """Read the memory of rank 0's device; on a CPU all ranks of this machine share it."""
    if device.type == "cpu":
        return Reading(world.local_size * peak_memory(device), free_memory(device))
    import torch

    module = torch.get_device_module(device)
    reserved = getattr(module, "max_memory_reserved", None) or module.driver_allocated_memory  # MPS has the latter
    return Reading(int(reserved()) + CONTEXT, free_memory(device))


def fits(need: int | None, live: Sequence[Reading]) -> bool:
    """Whether an arm fits beside live ones, of which the last was read last. `need`: its own memory, where it has run already."""
    if not live or live[-1].free is None:
        return True
    return MARGIN * (need or max(reading.used for reading in live)) <= live[-1].free


def ran_out(reason: str) -> bool:
    """Whether an arm's error is want of memory: torch's own words, and those of cuBLAS and cuDNN."""
    return any(words in reason for words in ("out of memory", "ALLOC_FAILED", "can't allocate memory"))

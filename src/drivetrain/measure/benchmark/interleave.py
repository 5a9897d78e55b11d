"""Interleaved benchmarks: each arm is a live process, and only one of them runs at any time.

A machine's speed drifts by more than most techniques gain, so no arm runs alone for long. In each round the arms run
short timed blocks in the order A B C C B A, and ratios are taken within a round. An arm that waits is stopped as a whole
(SIGSTOP to its process group, with its workers and ranks), so that it neither prefetches nor spins while another one is
timed. Each round starts fresh processes, because two processes of the same arm differ by 2 % or more for as long as they
live (memory layout and the like): rounds in one pair of processes would agree with each other, and be wrong.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from drivetrain.core import process
from drivetrain.core.device import peak_memory, synchronize
from drivetrain.launch.job import Job
from drivetrain.run import environment
from drivetrain.run.result import Result

WARMUP_UPDATES = 3  # beyond those that a run itself counts as its warm-up
LEAD = 0.15  # share of a block that runs untimed before it: prefetched batches are used up and caches are warm again
TIMEOUT_S = 900.0  # for an arm's warm-up, and for a block


class ArmEnded(Exception):
    """An arm's process has ended or does not answer; the message says why."""


@dataclass
class TimedBlock:
    """Measurements of one timed block of updates, or of an arm's blocks of one round together."""

    seconds: float
    updates: int
    samples: int
    data_wait_s: float  # seconds in which the step waited for data
    step_s: list[float]  # seconds of each update
    peak_memory: int  # bytes, since the process started

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds

    def __add__(self, other: TimedBlock) -> TimedBlock:
        return TimedBlock(
            self.seconds + other.seconds,
            self.updates + other.updates,
            self.samples + other.samples,
            self.data_wait_s + other.data_wait_s,
            self.step_s + other.step_s,
            max(self.peak_memory, other.peak_memory),
        )


class BenchmarkAgent:
    """The benchmark's side within an arm's process: it wraps the training stream and gets control between two updates."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._started = False

    def attach(self, trainer: Any) -> None:
        """Wrap a finished trainer's stream on rank 0, and let the run go on without end on every rank."""
        trainer.endless()
        if trainer.parallel.world.rank == 0:
            trainer.stream_watchers.append(lambda stream: self._serve(stream, trainer))

    def _serve(self, stream: Iterator[Any], trainer: Any) -> Iterator[Any]:
        """Warm up and report; then time a block of as many updates as each message asks for."""
        if self._started:  # the trainer starts again with a micro-batch half as large, which is another arm
            raise RuntimeError("out of memory")
        self._started = True
        yield from self._warm_up(stream, trainer)
        while True:
            updates = self._connection.recv()
            yield from self._updates(stream, max(1, round(LEAD * updates)), [], [])
            yield from self._timed_block(stream, updates, trainer)

    def _warm_up(self, stream: Iterator[Any], trainer: Any) -> Iterator[Any]:
        """Run the warm-up updates, then send the arm's facts."""
        step_s: list[float] = []
        began = time.perf_counter()
        yield from self._updates(stream, trainer.timer.warmup + WARMUP_UPDATES, step_s, [])
        synchronize(trainer.device)
        self._connection.send(
            {
                "warmup_s": time.perf_counter() - began,
                "step_s": statistics.median(step_s[trainer.timer.warmup :]),
                "compile_s": trainer.compile_seconds(),
                "device": environment.device_name(trainer.device),
                "global_batch": trainer.batch.size(0),
                "samples": len(trainer.train_data.source),
                "parameters": sum(p.numel() for p in trainer.model.parameters()),
            }
        )

    def _timed_block(self, stream: Iterator[Any], updates: int, trainer: Any) -> Iterator[Any]:
        """Run `updates` updates, then send their TimedBlock."""
        step_s: list[float] = []
        reads: list[tuple[float, int]] = []
        synchronize(trainer.device)
        began = time.perf_counter()
        yield from self._updates(stream, updates, step_s, reads)
        synchronize(trainer.device)
        seconds = time.perf_counter() - began
        samples = sum(count for _, count in reads) * trainer.parallel.data_world.size
        data_wait_s = sum(read_s for read_s, _ in reads)
        self._connection.send(TimedBlock(seconds, updates, samples, data_wait_s, step_s, peak_memory(trainer.device)))

    def _updates(self, stream: Iterator[Any], count: int, step_s: list[float], reads: list[tuple[float, int]]) -> Iterator[Any]:
        """Yield the micro-batches of `count` whole updates.

        Appends the seconds of each update to `step_s`, and the seconds and samples of each read to `reads`.
        """
        mark = time.perf_counter()
        while count:
            read_began = time.perf_counter()
            micro = next(stream)
            reads.append((time.perf_counter() - read_began, len(micro.x)))
            last = micro.last
            yield micro
            if last:  # control returns when the trainer asks for the next micro-batch: the update has been made
                count -= 1
                now = time.perf_counter()
                step_s.append(now - mark)
                mark = now


@dataclass
class Arm:
    """One job of a benchmark, in a live process of its own."""

    label: str
    job: Job
    run_dir: Path
    facts: dict[str, Any] = field(default_factory=dict)  # as its first process reported them after the warm-up
    blocks: list[TimedBlock] = field(default_factory=list)  # one for each round
    updates_per_block: int = 1
    error: str | None = None
    stopped_after: int | None = None  # rounds, where the stopping rule ended the arm
    _process: Any = None

    def start(self, round_: int = 0) -> None:
        """Fork the process, which builds and warms up at once. The calling process must not have run anything of torch."""
        self._round_dir = self.run_dir / str(round_)
        context = multiprocessing.get_context("fork")
        self._connection, child_end = context.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._round_dir.mkdir(parents=True)
        process: Any = context.Process(target=_child, args=(self.job, self._round_dir, child_end, self._connection))
        process.start()
        self._process = process
        with contextlib.suppress(OSError):
            os.setpgid(process.pid, process.pid)  # the child does the same: whichever comes first
        child_end.close()

    def warm_up(self, block_s: float) -> None:
        """Wait until the process is warm, and set how many updates fill a block. Raises ArmEnded."""
        facts = self._receive()
        self.facts = self.facts or facts
        self.updates_per_block = max(1, round(block_s / facts["step_s"]))
        self._signal(signal.SIGSTOP)

    def timed_block(self) -> TimedBlock:
        """Run one timed block while all other arms are stopped. Raises ArmEnded."""
        self._signal(signal.SIGCONT)
        self._connection.send(self.updates_per_block)
        block: TimedBlock = self._receive()
        self._signal(signal.SIGSTOP)
        return block

    def stop(self) -> None:
        """Kill the process, whatever it is doing."""
        if self._process is not None:
            if self._process.is_alive():
                self._signal(signal.SIGKILL)
            self._process.join()
            self._process = None

    def _receive(self) -> Any:
        try:
            if not self._connection.poll(TIMEOUT_S):
                raise ArmEnded(f"it did not answer for {TIMEOUT_S:.0f} s")
            return self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            result = Result.read(self._round_dir)
            raise ArmEnded((result and result.error) or f"its process ended with code {self._process.exitcode}") from None

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


# Called after each round with the arms that ran it and the number of rounds; returns the arms that run no further rounds.
StoppingRule = Callable[[Sequence[Arm], int], Iterable[Arm]]


def never_stop(arms: Sequence[Arm], rounds: int) -> Iterable[Arm]:
    """The stopping rule that lets every arm run all rounds."""
    return ()


def _child(job: Job, run_dir: Path, connection: Connection, parent_end: Connection) -> None:
    """The arm's process: an ordinary run whose output goes to a file."""
    from drivetrain.launch import launcher

    os.setpgid(0, 0)
    parent_end.close()  # else this process would never notice that the parent is gone
    process.restart_clock()
    log = os.open(run_dir / "output.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    job.attach = BenchmarkAgent(connection).attach
    code = 1
    try:
        code = launcher.launch(job, run_dir, quiet=True).code
    except Exception as error:
        Result(error=str(error), overrides=job.composed.overrides).write(run_dir)
    finally:
        os._exit(code)


def run_rounds(
    arms: Sequence[Arm],
    rounds: int,
    block_s: float,
    progress: Callable[..., None] = lambda *_: None,
    stopping_rule: StoppingRule = never_stop,
) -> None:
    """Run up to `rounds` rounds: two timed blocks of about `block_s` seconds for each arm, each round.

    An arm that fails gets its `error` and runs no further rounds; neither does one that the stopping rule names. The
    benchmark ends when only the first arm, the baseline, is left.
    """
    live, round_s = list(arms), 0.0
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}", round_s * (rounds - number) or None)
        began = time.monotonic()
        _run_round(live, number, block_s)
        round_s = time.monotonic() - began
        live = [arm for arm in live if arm.error is None]
        for arm in stopping_rule(live, number + 1):
            arm.stopped_after = number + 1
        live = [arm for arm in live if arm.stopped_after is None]
        if live == list(arms[:1]) and len(arms) > 1:
            break


def _run_round(arms: Sequence[Arm], number: int, block_s: float) -> None:
    blocks: dict[int, TimedBlock] = {}

    def for_each(order: Iterable[Arm], action: Callable[[Arm], None]) -> None:
        for arm in order:
            if arm.error is None:
                try:
                    action(arm)
                except ArmEnded as reason:
                    arm.error = str(reason)

    def start_and_warm_up(arm: Arm) -> None:
        arm.start(number)
        arm.warm_up(block_s)

    def timed_block(arm: Arm) -> None:
        block = arm.timed_block()
        blocks[id(arm)] = blocks[id(arm)] + block if id(arm) in blocks else block

    # The order alternates between rounds, so that it is not always the same arm that runs after the idle time.
    order = list(arms) if number % 2 == 0 else list(reversed(arms))
    try:
        for_each(order, start_and_warm_up)
        for_each(order, timed_block)
        for_each(reversed(order), timed_block)
    finally:
        for arm in arms:
            arm.stop()
    for arm in arms:
        if arm.error is None:
            arm.blocks.append(blocks[id(arm)])

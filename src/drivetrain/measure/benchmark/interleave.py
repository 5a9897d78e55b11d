"""Runs that take turns: each arm of a comparison is a live process, and only one of them moves at any time.

A machine's speed wanders by more than most techniques bring, so no arm runs by itself for long: in each round they take
short turns, A B C C B A, and a ratio is taken within the round. An arm that waits is stopped as a whole, with its
workers and ranks: nothing of it reads ahead or spins while another one is timed. Each round has fresh processes, for
two of the same arm differ by 2 % or more for as long as they live (where their memory lies, and the like): rounds in
one pair of processes would agree with each other, and be wrong.
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

ENDLESS = 2**62
WARM = 3  # updates after those that a run counts as its warm-up
LEAD = 0.15  # of a turn: run before it is timed, so that what was read ahead is used up and caches are warm again
PATIENCE_S = 900.0  # for an arm's first word, and beyond what a turn should take


class Lost(Exception):
    """An arm has ended; why."""


@dataclass
class Turn:
    """One turn of one arm, or its turns of one round together: timed updates, and what they took."""

    seconds: float
    updates: int
    samples: int
    wait: float  # seconds in which the step waited for data
    steps: list[float]  # seconds of each update
    memory: int  # bytes at the peak, so far

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds

    def and_then(self, other: Turn) -> Turn:
        """Both turns as one."""
        return Turn(
            self.seconds + other.seconds, self.updates + other.updates, self.samples + other.samples, self.wait + other.wait,
            self.steps + other.steps, max(self.memory, other.memory),
        )  # fmt: skip


class BenchmarkAgent:
    """An arm's own side: sits in the training stream, where control comes by between two updates."""

    def __init__(self, connection: Connection, compile_s: Callable[[], float | None]) -> None:
        self._connection, self._compile_s = connection, compile_s
        self._taken = False

    def attach(self, trainer: Any) -> None:
        """Take the seat in a finished trainer. Its run has no end of its own from now on; only rank 0 is talked to."""
        trainer.max_updates = trainer.epochs = trainer.evaluate_every = ENDLESS
        if trainer.parallel.world.rank == 0:
            before = trainer.watch
            trainer.watch = lambda stream: self._turns(iter(before(stream)), trainer)

    def _turns(self, stream: Iterator[Any], trainer: Any) -> Iterator[Any]:
        if self._taken:  # the trainer begins anew, with a micro-batch half as large: that is another arm
            raise RuntimeError("out of memory")
        self._taken = True
        warmup = trainer.timer.warmup + WARM
        steps: list[float] = []
        began = time.perf_counter()
        yield from self._updates(stream, warmup, steps, [])
        synchronize(trainer.device)
        self._connection.send(
            {
                "warmup_s": time.perf_counter() - began,
                "step_s": statistics.median(steps[trainer.timer.warmup :]),
                "compile_s": self._compile_s(),
                "device": environment.device_name(trainer.device),
                "global_batch": trainer.batch.size(0),
                "samples": len(trainer.train_data.source),
                "parameters": sum(p.numel() for p in trainer.model.parameters()),
            }
        )
        while True:
            updates = self._connection.recv()
            yield from self._updates(stream, max(1, round(LEAD * updates)), [], [])
            synchronize(trainer.device)
            steps = []
            reads: list[tuple[float, int]] = []
            began = time.perf_counter()
            yield from self._updates(stream, updates, steps, reads)
            synchronize(trainer.device)
            self._connection.send(self._turn(time.perf_counter() - began, steps, reads, trainer))

    def _turn(self, seconds: float, steps: list[float], reads: list[tuple[float, int]], trainer: Any) -> Turn:
        samples = sum(n for _, n in reads) * trainer.parallel.data_world.size
        wait = sum(s for s, _ in reads)
        return Turn(seconds, len(steps), samples, wait, steps, peak_memory(trainer.device))

    def _updates(self, stream: Iterator[Any], count: int, steps: list[float], reads: list[tuple[float, int]]) -> Iterator[Any]:
        """So many updates of the stream, to their end; `steps` and `reads` get the seconds of each update and each read."""
        mark = time.perf_counter()
        while count:
            asked = time.perf_counter()
            micro = next(stream)
            reads.append((time.perf_counter() - asked, len(micro.x)))
            last = micro.last
            yield micro
            if last:  # control comes back when the next one is asked for: the update has been made
                count -= 1
                now = time.perf_counter()
                steps.append(now - mark)
                mark = now


@dataclass
class Arm:
    """One job in a live process of its own."""

    label: str
    job: Job
    run_dir: Path
    facts: dict[str, Any] = field(default_factory=dict)  # as the first of its processes told them
    turns: list[Turn] = field(default_factory=list)  # of each round, together
    updates: int = 1  # of a turn
    error: str | None = None
    left: int | None = None  # after how many rounds it needed no more
    _process: Any = None

    def start(self, round_: int = 0) -> None:
        """Fork it; it builds and warms up at once. This process must have run nothing of torch."""
        self._place = self.run_dir / str(round_)
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._place.mkdir(parents=True)
        process: Any = context.Process(target=_live, args=(self.job, self._place, theirs, self._connection))
        process.start()
        self._process = process
        with contextlib.suppress(OSError):
            os.setpgid(process.pid, process.pid)  # as it does itself: whoever comes first
        theirs.close()

    def warm(self, turn_s: float) -> None:
        """Wait until it is warm; then how many updates fill a turn is known. Raises Lost."""
        facts = self._receive(PATIENCE_S)
        self.facts = self.facts or facts
        self.updates = max(1, round(turn_s / facts["step_s"]))
        self._signal(signal.SIGSTOP)

    def turn(self) -> Turn:
        """Let it make its updates while all others stand still. Raises Lost."""
        self._signal(signal.SIGCONT)
        self._connection.send(self.updates)
        told = self._receive(PATIENCE_S)
        self._signal(signal.SIGSTOP)
        return told

    def stop(self) -> None:
        """End its process, whatever that does."""
        if self._process is not None:
            if self._process.is_alive():
                self._signal(signal.SIGKILL)
            self._process.join()
            self._process = None

    def _receive(self, patience: float) -> Any:
        try:
            if not self._connection.poll(patience):
                raise Lost(f"no word from it for {patience:.0f} s")
            return self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            result = Result.read(self._place)
            raise Lost((result and result.error) or f"its process ended with code {self._process.exitcode}") from None

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


Leaving = Callable[[Sequence[Arm], int], Iterable[Arm]]  # after so many rounds, of those that took them: who needs no more


def _live(job: Job, run_dir: Path, connection: Connection, theirs: Connection) -> None:
    """The arm's process: an ordinary run, whose output goes to a file."""
    from drivetrain.launch import launcher

    os.setpgid(0, 0)
    theirs.close()  # else this end would never hear that the other is gone
    process.restart_clock()
    log = os.open(run_dir / "output.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    job.attach = BenchmarkAgent(connection, job.run.compile.seconds).attach
    code = 1
    try:
        code = launcher.launch(job, run_dir, quiet=True).code
    except Exception as error:
        Result(error=str(error), overrides=job.composed.overrides).write(run_dir)
    finally:
        os._exit(code)


def take_turns(
    arms: Sequence[Arm],
    rounds: int,
    turn_s: float,
    say: Callable[..., None] = lambda *_: None,
    leaving: Leaving = lambda *_: (),
) -> None:
    """Let the arms go through `rounds` rounds with two turns each of about `turn_s` seconds.

    An arm that fails has its reason in `error`, and no further rounds; none has one that is `leaving`. When the first arm
    is the only one left, there is nothing more to compare.
    """
    live, took = list(arms), 0.0
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}", took * (rounds - number) or None)
        began = time.monotonic()
        _round(live, number, turn_s)
        took = time.monotonic() - began
        live = [arm for arm in live if arm.error is None]
        for arm in leaving(live, number + 1):
            arm.left = number + 1
        live = [arm for arm in live if arm.left is None]
        if live == list(arms[:1]) and len(arms) > 1:
            break


def _round(arms: Sequence[Arm], number: int, turn_s: float) -> None:
    taken: dict[int, Turn] = {}

    def each(order: Iterable[Arm], act: Callable[[Arm], None]) -> None:
        for arm in order:
            if arm.error is None:
                try:
                    act(arm)
                except Lost as lost:
                    arm.error = str(lost)

    def warm(arm: Arm) -> None:
        arm.start(number)
        arm.warm(turn_s)

    def turn(arm: Arm) -> None:
        mine = arm.turn()
        taken[id(arm)] = taken[id(arm)].and_then(mine) if id(arm) in taken else mine

    # Who comes first changes: not always the same one follows the idle time.
    order = list(arms) if number % 2 == 0 else list(reversed(arms))
    try:
        each(order, warm)
        each(order, turn)
        each(reversed(order), turn)
    finally:
        for arm in arms:
            arm.stop()
    for arm in arms:
        if arm.error is None:
            arm.turns.append(taken[id(arm)])

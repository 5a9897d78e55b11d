"""Forecasts a plan, in the process that may build it: memory, time, and what limits the step."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drivetrain.core import trees
from drivetrain.core.blocks import blocks_for
from drivetrain.core.context import NO_RUN_DIR, BuildContext
from drivetrain.core.device import memory_of_process
from drivetrain.core.errors import UserError
from drivetrain.core.world import World
from drivetrain.engine import build
from drivetrain.engine.rehearsal import fake_step
from drivetrain.engine.rehearsal.fake_step import autocast_of
from drivetrain.engine.rehearsal.recorder import Fakes
from drivetrain.engine.rehearsal.search import fewest, peak_bytes, recomputed
from drivetrain.measure.forecast import replay
from drivetrain.measure.forecast.plan import Memory, Plan, peak_memory, sent_bytes
from drivetrain.measure.forecast.replay import HERE, Device, Figure, known, this_device

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

FILLED = 0.97  # of a device's memory that a run may fill
NOTHING = Figure.exactly(0.0)
PROCESS = 0.95, 1.2  # of what the process of a run holds when it is built, which grows with what it loads later
HEAP = Figure(0.4, 0.0, 0.8)  # of the tensors' peak: what a process keeps of freed memory, between tensors that live
DATA, NETWORK = "data", "network"
UNREADABLE = (RuntimeError, NotImplementedError, AssertionError, TypeError, ValueError, ArithmeticError, LookupError)


def of_process(tensors: Figure, beside: Figure) -> Figure:
    """The peak of a CPU's process by that of its tensors and what it holds `beside` them; that of the tensors where it is 0."""
    return tensors + beside + HEAP.times(tensors.value) if beside.value else tensors


@dataclass
class Forecast:
    """The forecast of a run. Seconds and bytes are those of one rank."""

    device: str
    source: str
    ranks: int
    micro_batch: int
    micro_batches: int
    memory: Memory
    memory_limit: float
    flops: float  # of an update
    moved_bytes: float  # read and written by an update's operations
    operations: int  # of an update
    compute: Figure  # seconds of an update's operations
    reading: Figure  # seconds that an update waits for data
    network: Figure  # seconds that it waits for other ranks
    shares: dict[str, float]  # of the time of an update, by what limits it
    updates: int
    first_updates: float  # the updates, those that are larger than the first counted as many times as they are larger
    evaluation: Figure  # seconds of all evaluations
    samples: int  # of an update, over all ranks
    sample_bytes: float
    timed_share: float  # of the operations' work, that was timed here; the rest is the roofline's
    beside: Figure  # bytes of the process beside its tensors, on a CPU: Python, torch, the data
    largest: Figure | None = None  # micro-batch that fits

    @property
    def step(self) -> Figure:
        """Seconds of an update."""
        return self.compute + self.reading + self.network

    @property
    def whole(self) -> Figure:
        """Seconds of the whole run, without start, compiling and saving."""
        return self.step.times(self.first_updates) + self.evaluation

    @property
    def limit(self) -> str:
        """The part that takes most of an update's time."""
        return max(self.shares, key=lambda name: self.shares[name])

    @property
    def fits(self) -> bool:
        """True if the likely peak fits."""
        return self.peak.value <= FILLED * self.memory_limit

    @property
    def peak(self) -> Figure:
        """The peak that the run will print: that of the device's allocator, on a CPU that of the whole process."""
        return of_process(self.memory.peak, self.beside)


@dataclass
class Subject:
    """A plan's trainer as it was built here, with what is known of the device."""

    plan: Plan
    trainer: Trainer
    device: Device
    rehearsal: fake_step.Rehearsal
    here: bool
    timed: dict[str, replay.Timed] = field(default_factory=dict)  # operations by signature, where it is this machine
    records: dict[tuple[int, int, int], fake_step.StepRecord] = field(default_factory=dict)  # and how many are recomputed
    blocks: list[Any] = field(default_factory=list)  # of the model, where checkpointing.memory_gb says how many are recomputed
    recomputed: int = 0  # of the blocks, the first ones
    beside: Figure = NOTHING  # of memory: what the process of this machine's CPU holds beside its tensors
    on_exit: ExitStack = field(default_factory=ExitStack)  # undoes what building changed for the whole process

    @classmethod
    def build(cls, plan: Plan, trainer: Trainer | None = None) -> Subject:
        """Build the plan's run in this process, unless it is given. Raises UserError."""
        on_exit = ExitStack()
        if trainer is None:
            run = plan.look()
            fakes = None if plan.times_layers else Fakes().as_parameters()
            context = BuildContext(run, World(), NO_RUN_DIR, on_exit=on_exit, without_values=fakes)
            trainer = build.build(context, [])
        here, beside = plan.device == HERE, NOTHING
        if here and trainer.device.type == "cpu":
            tensors = {id(t): t.nbytes for kind in fake_step.resident(trainer).values() for t in kind}
            beside = Figure.within(max(0.0, memory_of_process() - sum(tensors.values())), *PROCESS)
        dtype = plan.run.precision.dtype
        device = this_device(trainer.device, (dtype,) if dtype else ()) if here else known(plan.device)
        return cls(
            plan,
            trainer,
            device,
            fake_step.Rehearsal(trainer, fake_step.one_sample(trainer)),
            here,
            beside=beside,
            on_exit=on_exit,
        )

    def record(self, size: int, micro_batches: int) -> fake_step.StepRecord:
        """The record of updates of micro-batches of this size. Raises UserError where the step needs values."""
        key = size, micro_batches, self.recomputed
        if key not in self.records:
            with recomputed(self.blocks[: self.recomputed]):
                self.records[key] = self._recorded(size, micro_batches)
        return self.records[key]

    def choose_recomputed(self, size: int, micro_batches: int) -> None:
        """Recompute as many blocks as the run would by checkpointing.memory_gb. Raises UserError where that is too little."""
        option: Any = self.plan.run.checkpointing
        if option.memory_gb is None:
            return
        self.blocks = blocks_for(self.plan.run.named("checkpointing"), "checkpointing.block", self.trainer.model, option.block)

        def peak(count: int) -> float:
            self.recomputed = count
            return peak_bytes(self.record(size, micro_batches))

        self.recomputed, nbytes = fewest(peak, len(self.blocks), option.memory_gb * 2**30)
        found = {"blocks": len(self.blocks), "recomputed": self.recomputed, "bytes": nbytes}
        if nbytes > option.memory_gb * 2**30:
            raise UserError(option.too_little(found, size))

    def _recorded(self, size: int, micro_batches: int) -> fake_step.StepRecord:
        try:
            with autocast_of("cpu" if self.here else "cuda"):
                return self.rehearsal.record(size, micro_batches)
        except UNREADABLE as error:
            why = str(error).strip().splitlines() or [""]
            raise UserError(
                f"the step cannot be recorded without values ({type(error).__name__}: {why[0][:200]}): a model or a loss reads "
                "its tensors on the host, or makes shapes of their values; `drivetrain doctor` measures such a run"
            ) from None

    def memory(self, record: fake_step.StepRecord, at_most: float, measured: bool) -> Memory:
        """The peak of a record."""
        return peak_memory(record.peak, at_most, measured, self.plan.ranks(self.trainer.model), self.device)


def examine(subject: Subject, budget_s: float, until: float | None = None) -> Forecast:
    """Forecast a plan in which `budget_s` seconds are for timing operations; with `until`, also the largest micro-batch."""
    plan, trainer, sample = subject.plan, subject.trainer, subject.rehearsal.sample
    size, micro_batches = plan.micro_batch(), plan.micro_batches()
    reading = 0.0
    if subject.here:
        read = trainer.batch.micro_batch(trainer.parallel.data_world)  # samples, in one process: ranks take less each
        reading = replay.reading_seconds(trainer, trainer.device) * size / read
    subject.choose_recomputed(size, micro_batches)
    record = subject.record(size, micro_batches)
    rows = replay.rows(record, trainer.device, budget_s if subject.here else 0.0, subject.timed)
    at_most = max((row.at_most for row in rows), default=0)
    ranks = plan.ranks(trainer.model)
    memory = subject.memory(record, at_most, subject.here)
    took = replay.step_time(rows, subject.device, bool(getattr(plan.run.precision, "matmul", "")), plan.compiled())
    weights = float(record.peak.get(fake_step.PARAMETERS, 0))
    nbytes = sent_bytes(weights, ranks, micro_batches)
    network = replay.network_seconds(nbytes, subject.device, took.backward_s) if nbytes else Figure.exactly(0.0)
    waits = Figure.within(reading * micro_batches, 0.7, 1.5)
    step = took.seconds + waits + network
    shares = {limit: share * took.seconds.value / step.value for limit, share in took.shares.items()}
    shares |= {DATA: waits.value / step.value, NETWORK: network.value / step.value}
    evaluated = trainer.evaluator.samples() * (trainer.epochs // trainer.evaluate_every or 1)
    forward = took.forward_s / (size * micro_batches) * evaluated
    found = Forecast(
        plan.device, subject.device.source, ranks.count, size, micro_batches, memory, _limit(subject),
        sum(row.flops * row.times for row in rows), sum(row.nbytes * row.times for row in rows), sum(row.times for row in rows),
        took.seconds, waits, network, shares, trainer.max_updates, _first_updates(trainer),
        Figure.within(forward, 0.6, 1.6), plan.run.batch.size(0), trees.nbytes(sample.x) / trees.length(sample.x),
        replay.timed_share(rows, subject.device), subject.beside,
    )  # fmt: skip
    if until is not None and not plan.run.batch.buckets_lengths:
        found.largest = _largest(subject, record, at_most, until)
    return found


def _first_updates(trainer: Trainer) -> float:
    """The number of a run's updates. Where its batch grows, one that is four times as large as the first counts as four."""
    batch, left, found = trainer.batch, trainer.max_updates, 0.0
    if not batch.grow_every:
        return float(left)
    for stretch in batch.stretches(trainer.epochs):
        updates = min(left, len(stretch) * batch.updates(trainer.batch.order.length, stretch.start, trainer.drop_last))
        left, found = left - updates, found + updates * batch.size(stretch.start) / batch.size(0)
    return found


def _limit(subject: Subject) -> float:
    """The memory that a rank may use."""
    given = getattr(subject.plan.run.batch, "memory_gb", None)
    return given * 2**30 if given else subject.device.memory


def _largest(subject: Subject, record: fake_step.StepRecord, at_most: float, until: float) -> Figure | None:
    """The largest micro-batch whose peak fits, by the likely, the highest and the lowest forecast; None if none fits.

    Memory grows with the micro-batch by a line, which two sizes give; a third record corrects it.
    """
    first = record.micro_batch
    beside = max(0.0, at_most - sum(record.peak.values())) / first  # kernels' own buffers grow with the micro-batch

    def peak_at(made: fake_step.StepRecord, at_most: float) -> Figure:
        return of_process(subject.memory(made, at_most, subject.here).peak, subject.beside)

    def peaks(size: int) -> Figure:
        made = subject.record(size, subject.plan.micro_batches())
        return peak_at(made, sum(made.peak.values()) + beside * size)

    limit = FILLED * _limit(subject)
    low = (first, peak_at(record, at_most))
    other = max(2, first // 2) if first > 3 else 2 * first
    at = [low, (other, peaks(other))]
    for _ in range(2):
        sizes = Figure(*(_crossing(at, which, limit) for which in (0, 2, 1)))
        middle = min(int(sizes.value), 2**24)
        if time.perf_counter() > until or middle < 2 or middle in (size for size, _ in at):
            break
        at = [at[-1], (middle, peaks(middle))]
    return sizes if sizes.value >= 1 else None


def _crossing(at: list[tuple[int, Figure]], which: int, limit: float) -> float:
    """The size at which a line through two peaks meets the limit."""
    (n1, p1), (n2, p2) = at[-2:]
    slope = (p2[which] - p1[which]) / (n2 - n1)
    return max(0.0, float(int(n1 + (limit - p1[which]) / slope))) if slope > 0 else 2.0**24

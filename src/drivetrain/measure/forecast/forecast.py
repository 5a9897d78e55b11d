"""`drivetrain forecast`: peak memory, time and limits of a run before it is started, in the process that may build it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from drivetrain.checkpointing.base import Blocks
from drivetrain.core import trees
from drivetrain.core.blocks import blocks_for
from drivetrain.core.context import NO_RUN_DIR
from drivetrain.core.device import memory_of_process
from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.option import Positive
from drivetrain.core.typed import JsonObject
from drivetrain.core.world import World
from drivetrain.engine import build, child
from drivetrain.engine.context import RunContext
from drivetrain.engine.rehearsal import fake_step
from drivetrain.engine.rehearsal.recorder import Fakes
from drivetrain.engine.rehearsal.search import fewest, peak_bytes, recomputed
from drivetrain.measure import verbs
from drivetrain.measure.benchmark import variants
from drivetrain.measure.changes import apply, groups_of
from drivetrain.measure.forecast import replay
from drivetrain.measure.forecast.plan import Memory, Plan, peak_memory, plan, sent_bytes
from drivetrain.measure.forecast.replay import FORECAST_ONLY, HERE, NAMES, Device, Figure, known, this_device
from drivetrain.ui.output import echo
from drivetrain.ui.progress import Steps
from drivetrain.ui.sheet import Section, Sheet, Table, facts, under, words
from drivetrain.ui.terminal import duration

if TYPE_CHECKING:
    import torch

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
    blocks: list[torch.nn.Module] = field(default_factory=list)  # of which checkpointing.memory_gb recomputes some
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
            context = RunContext(run, World(), NO_RUN_DIR, on_exit=on_exit, without_values=fakes)
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
        if (most := self.plan.run.checkpointing.memory_gb) is None:
            return
        option, limit = Blocks.of(self.plan.run), most * 2**30
        self.blocks = blocks_for(self.plan.run.named("checkpointing"), "checkpointing.block", self.trainer.model, option.block)

        def peak(count: int) -> float:
            self.recomputed = count
            return peak_bytes(self.record(size, micro_batches))

        self.recomputed, nbytes = fewest(peak, len(self.blocks), limit)
        found = {"blocks": len(self.blocks), "recomputed": self.recomputed, "bytes": nbytes}
        if nbytes > limit:
            raise UserError(option.too_little(found, size))

    def _recorded(self, size: int, micro_batches: int) -> fake_step.StepRecord:
        try:
            with nullcontext() if self.here else fake_step.CudaAutocast():
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
        reading = replay.reading_seconds(trainer) * size / read
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


GAIN = 1.1  # that counts as help: timings of the same operations differ by some per cent
ROW_S = 1.0  # of timing operations that are new in a row
RANKS = (2, 8)
SAME_MODEL = {"compile", "parallel", "batch"}  # groups that change nothing of the trainer as it is built to be looked at
RECOMPUTED = "checkpointing=blocks"  # its step is that of the trainer as it is, with all its blocks recomputed
FITTING = (RECOMPUTED, "batch=", "parallel=")  # most memory for least time and machines


@dataclass
class Row:
    """One override, and what it changes: the ratios of samples a second and of peak memory to the run's."""

    override: str
    speed: float | None = None
    memory: float | None = None
    step_s: float | None = None
    peak_bytes: float | None = None
    fits: bool | None = None
    why_not: str = ""  # it is not forecast


def candidates(run_plan: Plan) -> Iterator[str]:
    """Overrides that change speed or memory, and not what is trained, as far as the run does not have them.

    First what usually helps most for the time that its forecast takes: there may be no time for all.
    """
    run = run_plan.run
    if not run.compile.active:
        yield "compile=inductor"
    if run.precision.full_float32:
        yield "precision=bf16"
    if run.parallel.one_process and run_plan.device != HERE:
        for ranks in RANKS:
            yield f"parallel=fsdp parallel.nproc={ranks}"
    if not run.checkpointing.active:
        yield RECOMPUTED
    if run.batch.fixed_micro_batches and run.batch.size(0) % (2 * run_plan.micro_batches()) == 0:
        yield f"batch=accumulate batch.accumulation_steps={2 * run_plan.micro_batches()}"
    yield "checkpointing=none" if run.checkpointing.active else "checkpointing=selective"


def table(base: Forecast, subject: Subject, until: float) -> list[Row]:
    """Forecast each candidate that should be done in time, going by what others of its kind took; the others say so.

    Of a run that does not fit those come first that may make it fit, and the quick ones of them are forecast until one does.
    """
    rows, longest = [], {True: 0.0, False: 0.0}
    sought = not base.fits
    for override in sorted(candidates(subject.plan), key=_fitting if sought else lambda _: 0):
        began, rebuilt = time.perf_counter(), not _same_model(override)
        if began + longest[rebuilt] > until and (rebuilt or not sought):
            rows.append(Row(override, why_not="not forecast: the time was up (seconds=60 gives it more)"))
            continue
        rows.append(_row(override, base, subject))
        sought = sought and not rows[-1].fits
        longest[rebuilt] = max(longest[rebuilt], time.perf_counter() - began)
    return rows


def _fitting(override: str) -> int:
    return next((n for n, start in enumerate(FITTING) if override.startswith(start)), len(FITTING))


def _same_model(override: str) -> bool:
    return override.startswith(RECOMPUTED) or groups_of(override.split()) <= SAME_MODEL


def _row(override: str, base: Forecast, subject: Subject) -> Row:
    own = subject.plan
    try:
        changed = _changed(own, override)
        if changed.run.batch.size(0) != own.run.batch.size(0):  # another option has another default, or misses a preset's
            override += f" batch.global_batch={own.run.batch.size(0)}"
            changed = _changed(own, override)
        if override.startswith(RECOMPUTED):
            blocks = blocks_for(RECOMPUTED, "checkpointing.block", subject.trainer.model, None)
            found = examine(replace(subject, plan=changed, blocks=blocks, recomputed=len(blocks)), ROW_S)
        elif _same_model(override):
            found = examine(replace(subject, plan=changed), ROW_S)
        else:
            built = replace(Subject.build(changed), timed=subject.timed, beside=subject.beside)
            with built.on_exit:
                found = examine(built, ROW_S)
    except UserError as error:
        return Row(override, why_not=error.problems[0])
    step, peak = found.step.value, found.memory.peak.value
    return Row(override, base.step.value / step, peak / base.memory.peak.value, step, peak, found.fits)


def _changed(own: Plan, override: str) -> Plan:
    changed = plan(apply(own.overrides, override.split(), own.config_dirs), own.config_dirs, own.device)
    return replace(changed, steps=own.steps)


def best(rows: list[Row]) -> tuple[Row | None, Row | None]:
    """The rows that help most in time and in memory; None where no row helps."""
    told = [row for row in rows if row.speed is not None and row.memory is not None]
    # More micro-batches compute no less: what they seem to save is the error of timing other shapes.
    faster = max((r for r in told if not r.override.startswith("batch=")), key=lambda row: row.speed or 0, default=None)
    smaller = min(told, key=lambda row: row.memory or 1, default=None)
    return (
        faster if faster is not None and (faster.speed or 0) > GAIN else None,
        smaller if smaller is not None and (smaller.memory or 1) < 1 / GAIN else None,
    )


MIB, GIB = 2**20, 2**30


def as_dict(answers: Sequence[Answer]) -> JsonObject:
    """The forecast as plain values. A figure is [value, low, high]; seconds, bytes and samples."""
    if not answers[0].stage:
        return _values(answers[0])
    stages = [{"stage": each.stage, "share": each.share, **_values(each)} for each in answers]
    return {"fits": fits(answers), "run_s": whole(answers), "stages": stages}


def _values(answer: Answer) -> JsonObject:
    found = answer.forecast
    return {
        "device": found.device,
        "source": found.source,
        "ranks": found.ranks,
        "micro_batch": found.micro_batch,
        "micro_batches": found.micro_batches,
        "peak_bytes": found.peak,
        "tensors_bytes": found.memory.peak,
        "memory": found.memory.parts,
        "memory_limit_bytes": found.memory_limit,
        "fits": found.fits,
        "flops": found.flops,
        "moved_bytes": found.moved_bytes,
        "operations": found.operations,
        "step_s": found.step,
        "compute_s": found.compute,
        "data_wait_s": found.reading,
        "network_s": found.network,
        "shares": found.shares,
        "timed_share": found.timed_share,
        "limit": found.limit,
        "updates": found.updates,
        "run_s": found.whole,
        "samples_per_second": found.samples / found.step.value,
        "data_bytes_per_second": found.sample_bytes * found.samples / found.step.value,
        "largest_micro_batch": found.largest,
        "what_if": [asdict(row) for row in answer.rows],
        "notes": answer.notes,
    }


def sheet(answers: Sequence[Answer]) -> Sheet:
    """The forecast: whether the run fits and how long it takes, memory, time, and what one more override would change."""
    most = max((each.forecast for each in answers), key=lambda found: found.peak.high)  # memory
    device = "this machine" if most.device == HERE else most.device
    memory = f"{_figure(most.peak, size)} of {size(most.memory_limit)} on {device}"
    takes = f"its peak memory is {memory}; it takes {_figure(whole(answers), run_time)}"
    body = _staged(answers) if answers[0].stage else _alone(answers[0])
    conclusion = f"The run {'fits' if most.fits else 'does NOT fit'}: {takes}"
    return Sheet("Memory and time before the start – drivetrain forecast", conclusion, [*body, *_notes(answers)])


def _alone(answer: Answer) -> list[Section]:
    """A run with one config: its facts, its memory and what one more override would change."""
    found = answer.forecast
    every = sum(found.memory.parts.values()) or 1
    rows = [(kind, size(nbytes), f"{100 * nbytes / every:.0f} %") for kind, nbytes in found.memory.parts.items()]
    parts = Table(("memory", "size", "share"), rows, "Memory", bars={"size": list(found.memory.parts.values())})
    body: list[Section] = [words(*_title(found)), facts(list(_facts(found)), "Forecast"), *under("What takes the memory", parts)]
    return [*body, *_what_if(answer.rows, found.fits)]


def _staged(answers: Sequence[Answer]) -> list[Section]:
    """A run with stages: what each stage is forecast to be."""
    rows = []
    for number, each in enumerate(answers, 1):
        found = each.forecast
        share = f"stage {number} of {len(answers)}, {100 * each.share:.0f} % of the updates: {each.stage}"
        memory = f"{_figure(found.peak, size)}: {'fits' if found.fits else 'does NOT fit'}"
        rows.append([share, memory, _figure(found.step, seconds), f"{found.samples / found.step.value:,.0f}", found.limit])
    return [Table(("stage", "peak memory", "an update", "samples/s", "limited by"), rows, "Stages")]


def _title(found: Forecast) -> Iterator[str]:
    ranks = f"{found.ranks} × " if found.ranks > 1 else ""
    split = f" in {found.micro_batches} micro-batches" if found.micro_batches > 1 else ""
    yield f"forecast for {ranks}{found.device} ({found.source})"
    yield f"an update has {found.samples:,} samples: {math.ceil(found.samples / found.ranks):,} on each rank{split}"


def _facts(found: Forecast) -> Iterator[tuple[str, str]]:
    step, pace = found.step, found.samples / found.step.value
    counted = ", of the process, as the run prints it" if found.beside.value else ""
    yield "peak memory", f"{_figure(found.peak, size)} of {size(found.memory_limit)}{counted}"
    if found.beside.value:
        yield (
            "peak of its tensors",
            f"{_figure(found.memory.peak, size)}; beside them {size(found.beside.value)}, and freed memory",
        )
    if found.largest is not None:
        yield "largest micro-batch that fits", f"{_figure(found.largest, lambda n: f'{n:,.0f}')} samples"
    yield "an update", f"{_figure(step, seconds)}; {pace:,.0f} samples a second"
    work = f"{found.flops / 1e9:,.4g} GFLOP, {found.moved_bytes / 1e9:,.3g} GB moved, {found.operations:,} operations"
    yield "its work on each rank", f"{work}; {found.flops / step.value / 1e12:.3g} TFLOP/s"
    shares = sorted(found.shares.items(), key=lambda item: -item[1])
    named = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares if share > 0.005)
    yield "limited by", f"{found.limit}: {named}"
    if found.timed_share:
        yield "timed here", f"{100 * found.timed_share:.0f} % of it, operation by operation; the rest is a roofline"
    yield "data needed", f"{pace:,.0f} samples a second, {size(found.sample_bytes * pace)}/s as the model gets them"
    yield "whole run", f"{_figure(found.whole, run_time)} for {found.updates:,} updates and the evaluations"


def _what_if(rows: list[Row], fits: bool) -> list[Section]:
    if not rows:
        return []
    cells = [
        [row.override, "", "", row.why_not] if row.why_not
        else [row.override, f"× {row.speed:.2f}", f"× {row.memory:.2f}", "" if row.fits else "does not fit"]
        for row in rows
    ]  # fmt: skip
    enough = None if fits else next((row for row in rows if row.fits), None)
    faster, smaller = best(rows)
    said = {"it fits with": enough, "most speed": faster, "least memory": smaller}
    table = Table(("what if", "speed", "memory", "note"), cells, "What if", ("note",)).used(3)
    lines = [f"{name}: {row.override}" for name, row in said.items() if row is not None]
    return [*under("One override more", table), words(*lines)]


def _notes(answers: Sequence[Answer]) -> list[Section]:
    found = dict.fromkeys(note for answer in answers for note in answer.notes)
    if any(FORECAST_ONLY in answer.forecast.source for answer in answers):
        found["no step of this device was measured: the intervals are those of efficiencies that are usual in training"] = None
    return [words(*(f"note: {note}" for note in found))] if found else []


def _figure(figure: Figure, show: Callable[[float], str]) -> str:
    return f"{show(figure.value)} ({show(figure.low)} … {show(figure.high)})"


def size(nbytes: float) -> str:
    """Bytes in few characters."""
    if nbytes >= GIB:
        return f"{nbytes / GIB:.3g} GiB"
    return f"{nbytes / MIB:.3g} MiB" if nbytes >= MIB / 10 else f"{nbytes / 1024:.3g} KiB"


def seconds(value: float) -> str:
    """A short time in few characters."""
    if value >= 1:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} µs"


def run_time(value: float) -> str:
    """The time of a run in few characters, however short it is."""
    return duration(value) if value >= 1 else seconds(value)


SPLITS = 3  # that are tried for batch=auto
LOOK_SHARE = 0.25  # of the time, for timing operations of the run itself


@dataclass
class Settings:
    """The settings of `drivetrain forecast`."""

    device: Literal[NAMES] = "here"  # type: ignore[valid-type]
    seconds: Positive = 20.0  # that it may take, approximately
    what_if: bool = True


@dataclass
class Answer:
    """The findings of the process that built the run, or a stage as if the whole run were like it; plain values: they travel."""

    forecast: Forecast
    rows: list[Row]  # of what if
    notes: list[str]
    stage: str = ""  # its title
    share: float = 1.0  # of the run's updates


def fits(answers: Sequence[Answer]) -> bool:
    """True if the run, or each of its stages, fits the device's memory."""
    return all(each.forecast.fits for each in answers)


def whole(answers: Sequence[Answer]) -> Figure:
    """The seconds of the run: of each stage its share."""
    return sum((each.forecast.whole.times(each.share) for each in answers), NOTHING)


def command(argv: Sequence[str], config_dirs: Sequence[str] = (), as_json: bool = False) -> int:
    """Run `drivetrain forecast`; return its exit code: 1 where the run does not fit the device's memory."""
    settings, overrides = verbs.split([_quoted(word) for word in argv], Settings)
    variants.refuse_resume("forecast", overrides)
    with Steps() as progress:
        progress("building the run, and recording its step on fake tensors")
        planned, answers = forecast(overrides, config_dirs, settings)
    if as_json:
        echo(json.dumps(as_dict(answers), indent=2))
    else:
        found = sheet(answers)
        found.show()
        verbs.write(verbs.folder(planned.job, "forecast"), "forecast", found, ["forecast", *argv], as_dict(answers))
    return DONE if fits(answers) else FAILED


def _quoted(word: str) -> str:
    """A device in lower case, as H100; one whose name is a number, such as 4090, as a text."""
    key, _, value = word.partition("=")
    if key != "device":
        return word
    return f"device='{value}'" if value.isdecimal() else f"device={value.lower()}"


def forecast(
    overrides: Sequence[str], config_dirs: Sequence[str] = (), settings: Settings | None = None
) -> tuple[Plan, list[Answer]]:
    """Forecast a run, or each of its stages; return what was planned, and the answers. Raises UserError."""
    settings, until = settings or Settings(), time.perf_counter()
    planned = plan(overrides, config_dirs, settings.device)
    stages, answers = planned.stages() or [("", 1.0, planned)], []
    if planned.run.stages:  # what-if is of a run with one config
        settings = replace(settings, seconds=settings.seconds / len(stages), what_if=False)
    for title, share, each in stages:
        until += settings.seconds
        answers.append(replace(_built(each, settings, until), stage=title, share=share))
    return planned, answers


def _built(planned: Plan, settings: Settings, until: float) -> Answer:
    """The answer of a process of its own, which builds the run."""

    def question(trainer: Trainer) -> Answer:
        return answer(planned, trainer, settings, until)

    return child.ask(planned.look(), question, "the run cannot be forecast", values=planned.times_layers)


def answer(planned: Plan, trainer: Trainer, settings: Settings, until: float | None = None) -> Answer:
    """Forecast a plan whose trainer is built, in this process; by `until` of time.perf_counter() it should be done."""
    until = until or time.perf_counter() + settings.seconds
    subject = Subject.build(planned, trainer)
    found = examine(subject, LOOK_SHARE * settings.seconds, until)
    for _ in range(SPLITS if planned.finds_split else 0):
        # As many micro-batches as it takes to fit. Gradients that wait for the next one take memory too, so that the largest
        # micro-batch becomes smaller with the first split.
        if not found.fits and found.largest is not None:
            subject = replace(subject, plan=subject.plan.split(found.largest.value))
            found = examine(subject, LOOK_SHARE * settings.seconds, until)
    rows = table(found, subject, until) if settings.what_if else []
    chosen = [f"checkpointing.memory_gb: {subject.recomputed} of {len(subject.blocks)} blocks are recomputed"]
    return Answer(found, rows, [*planned.notes, *(chosen if subject.blocks else [])])

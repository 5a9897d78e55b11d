# long: the parts of a forecast add up, and are shown as they are computed
"""`drivetrain forecast`: peak memory, time and limits of a run before it is started, in the process that may build it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from drivetrain.checkpointing.base import Blocks
from drivetrain.config import validate
from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.machine.device import memory_of_process
from drivetrain.core.options import stages as of_run
from drivetrain.core.options.option import Positive, RunSpec
from drivetrain.core.options.overrides import format_value
from drivetrain.core.step import trees
from drivetrain.core.step.blocks import blocks_for, repeated_blocks
from drivetrain.core.typed import JsonObject
from drivetrain.engine import child, rehearsal
from drivetrain.engine.rehearsal import Rehearsal, StepRecord
from drivetrain.engine.trainer import Trainer
from drivetrain.launch.job import Job
from drivetrain.measure import verbs
from drivetrain.measure.benchmark import variants
from drivetrain.measure.changes import apply, groups_of
from drivetrain.measure.forecast import roofline
from drivetrain.measure.forecast.roofline import (
    ASKED_HOST,
    COMPILED_HOST,
    EAGER,
    FORECAST_ONLY,
    FUSED_BYTES,
    HERE,
    NAMES,
    NOTHING,
    ONE,
    RECORDED_HOST,
    CompiledShares,
    DeviceLimits,
    Uncertain,
)
from drivetrain.parallel import Parallel
from drivetrain.parallel.fsdp import Fsdp
from drivetrain.ui import sheet
from drivetrain.ui.output import echo
from drivetrain.ui.progress import Steps
from drivetrain.ui.terminal import duration

KINDS = (rehearsal.PARAMETERS, rehearsal.GRADIENTS, rehearsal.STATE, rehearsal.OTHER, rehearsal.BATCH)
COUNTED = (0.97, 1.04)  # of the peak of what was counted on this machine, where kernels' own buffers were measured
ELSEWHERE = (0.90, 1.15)  # where another device has other kernels
ALLOWANCE = Uncertain(0.05, 0.0, 0.15)  # of the activations, for kernels' own buffers where these were not measured


@dataclass(frozen=True)
class Ranks:
    """The layout of a run over ranks, as far as memory and network depend on it."""

    count: int = 1
    shards: int = 1  # over which weights, gradients and optimizer state are divided
    owners: int = 1  # over which the state alone is divided
    keeps_gathered: bool = False  # whole weights stay between forward and backward
    whole_gradients: bool = False  # gradients are divided only at an update's last micro-batch
    offloaded: bool = False  # a rank's own part of them is in the host's memory
    largest_block: float = 0.0  # bytes of the weights of the largest block that is gathered at once, where blocks are


def peak_memory(
    counted: Mapping[str, int], at_most: float, measured: bool, ranks: Ranks, device: DeviceLimits
) -> tuple[dict[str, float], Uncertain]:
    """The peak of one rank: bytes by kind with the workspace, and all together.

    `counted` are bytes by kind; `at_most` those with kernels' own buffers, where they were `measured`.
    """
    parts = sharded({kind: float(counted.get(kind, 0)) for kind in KINDS}, ranks)
    if measured:
        factors, workspace = COUNTED, Uncertain.exactly(max(0.0, at_most - sum(counted.values())))
    else:
        factors, workspace = ELSEWHERE, device.workspaces + ALLOWANCE.times(parts[rehearsal.OTHER])
    whole, fragmentation = sum(parts.values()), device.fragmentation
    parts["workspace"] = workspace.value + (fragmentation.value - 1) * whole
    return parts, fragmentation.times(Uncertain(1.0, *factors)).times(whole) + workspace


def sharded(parts: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
    """Divide what the ranks share. A block's weights are gathered while the one before it computes, its gradients are whole."""
    own = 0.0 if ranks.offloaded else 1 / ranks.shards  # of the parts that are divided
    gathered = parts[rehearsal.PARAMETERS] if ranks.keeps_gathered else 2 * ranks.largest_block
    gradients = parts[rehearsal.GRADIENTS] if ranks.whole_gradients else own * parts[rehearsal.GRADIENTS] + ranks.largest_block
    return {
        **parts,
        rehearsal.PARAMETERS: own * parts[rehearsal.PARAMETERS] + gathered,
        rehearsal.GRADIENTS: gradients,
        rehearsal.STATE: own / ranks.owners * parts[rehearsal.STATE],
    }


def sent_bytes(parameters: float, ranks: Ranks, micro_batches: int) -> float:
    """Bytes that a rank sends in an update: one all-reduce of gradients, or gathering weights twice and dividing gradients."""
    gathers = micro_batches * (1 if ranks.keeps_gathered else 2)
    sent = 2 + (ranks.owners > 1) if ranks.shards == 1 else gathers + 1
    return (ranks.count - 1) / ranks.count * parameters * sent


ALONE = ("parallel=single", "compile=none", "debug=none", "logger=[files]")  # as it is built to be looked at


@dataclass(frozen=True)
class PlannedRun:
    """A run that is planned for a device."""

    overrides: tuple[str, ...]
    config_dirs: tuple[str, ...]
    job: Job  # as it is planned
    device: str
    notes: tuple[str, ...] = ()
    steps: int | None = None  # micro-batches of an update that batch=auto is expected to take

    @property
    def run(self) -> RunSpec:
        """The options as they are planned."""
        return self.job.run

    @property
    def here(self) -> bool:
        """True if it is for this machine."""
        return self.device == HERE

    def micro_batches(self) -> int:
        """Micro-batches of an update on one rank."""
        return self.steps or int(self.run.batch.accumulation_steps)

    def micro_batch(self) -> int:
        """Samples of one rank's forward."""
        return -(-int(self.run.batch.size(0)) // (self.micro_batches() * int(self.run.parallel.data_ranks())))

    @property
    def values(self) -> float:
        """The most bytes of weights that get values: the run times layers of its model on this machine's CPU when it is built."""
        return MOST_VALUES if self.here and self.run.runtime.device_type() == "cpu" else 0

    def look(self) -> RunSpec:
        """The run that is built here. For another device no layer is timed for this CPU's sake."""
        changes = [*ALONE, *([] if self.here else ["runtime.device=cpu"])]
        checkpointing = self.run.checkpointing
        if checkpointing.chosen_by_compiler or checkpointing.keeps_on_host or checkpointing.memory_gb is not None:
            changes.append("checkpointing=none")
        if not self.run.batch.fixed_micro_batches and not self.run.batch.buckets_lengths:  # batch=auto finds its own
            changes.append("batch=fixed")
        return variants.prepare_without_saving(apply(self.overrides, changes, self.config_dirs), self.config_dirs)[1].run

    def changed(self, words: Sequence[str]) -> PlannedRun:
        """The plan with further overrides. Raises UserError."""
        return replace(plan(apply(self.overrides, words, self.config_dirs), self.config_dirs, self.device), steps=self.steps)

    def stages(self) -> list[tuple[str, float, PlannedRun]]:
        """Each stage: its title, its share of the run's updates, and a run that is like it from beginning to end."""
        words = [[f"{key}={format_value(value)}" for key, value in stage.changes.items()] for stage in self.run.stages]
        plans = [self.changed(["stages=null", *each]) for each in words]
        titles, shares = (stage.title for stage in self.run.stages), (share for _, share in of_run.alone(self.run))
        return list(zip(titles, shares, plans, strict=True))

    def compiled(self) -> CompiledShares:
        """The savings that compiling is assumed to bring, and the cost of a policy that is asked for each operation."""
        option = self.run.compile
        if not option.active or option.torchscript:
            return CompiledShares(host=ASKED_HOST) if self.run.checkpointing.asks_for_each_operation else EAGER
        recorded = option.captures_step or option.cuda_graphs
        host = RECORDED_HOST if recorded else COMPILED_HOST
        return CompiledShares(FUSED_BYTES if option.partitions_activations or option.captures_step else ONE, host)

    def ranks(self, model: torch.nn.Module) -> Ranks:
        """The layout of the run over ranks. Raises UserError for a strategy whose memory is not forecast."""
        parallel = Parallel.of(self.run)
        count = parallel.ranks()
        if parallel.one_process:
            return Ranks()
        if not parallel.own_forward or parallel.data_ranks() != count:
            raise UserError(
                f"{self.run.named('parallel')} splits the model in a way that is not forecast: forecast it with "
                "parallel=ddp or fsdp"
            )
        fsdp, shards = parallel if isinstance(parallel, Fsdp) else Fsdp(), parallel.weight_shards()
        owners = count if parallel.shard_optimizer else 1
        blocks = repeated_blocks(model, fsdp.block) or [model]
        largest = max(sum(p.nbytes for p in block.parameters()) for block in blocks) if shards > 1 or fsdp.offload else 0.0
        return Ranks(
            count, shards, owners, keeps_gathered=not fsdp.reshard_after_forward, largest_block=largest,
            offloaded=fsdp.offload, whole_gradients=self.micro_batches() > 1 and not fsdp.sync_each_micro,
        )  # fmt: skip


def plan(overrides: Sequence[str], config_dirs: Sequence[str], device: str) -> PlannedRun:
    """Validate a run that is planned. Raises UserError."""
    _, job = variants.prepare_without_saving(overrides, config_dirs)
    if device == HERE:
        validate.validate_device(job.run)
    if (tokens := job.run.batch.tokens) is not None:
        raise UserError(
            f"batch.tokens={tokens}: only reading the samples shows how many that is: set batch.tokens=null, and "
            "batch.global_batch to the samples of an update"
        )
    return PlannedRun(tuple(overrides), tuple(config_dirs), job, device, tuple(_notes(job, device)))


def _notes(job: Job, device: str) -> Iterator[str]:
    """The notes on what the forecast does not cover, or assumes."""
    run = job.run
    if run.checkpointing.chosen_by_compiler:
        yield "checkpointing=budget is the compiler's to choose: the peak is forecast with every activation kept"
    if run.checkpointing.keeps_on_host:
        yield f"{run.named('checkpointing')} is not recorded: the peak is forecast with every activation on the device"
    if isinstance(run.parallel, Fsdp) and run.parallel.offload:
        yield "parallel.offload=true: the copies to the host, and the optimizer's step there, are not in the time"
    if run.compile.active:
        yield (
            f"{run.named('compile')}: what it saves is assumed, not recorded (pointwise traffic × "
            f"{FUSED_BYTES.low:g}…{FUSED_BYTES.high:g}, the host's time × {RECORDED_HOST.low:g}…{COMPILED_HOST.high:g})"
        )
    batch: Any = run.batch  # some options have a `max`, or grow
    if batch.needs_trial:
        yield (
            f"{run.named('batch')} measures before the run, and chooses a batch of {batch.global_batch:,} to {batch.max:,} "
            "samples: the figures are those of the smallest"
        )
    elif batch.untried and device == HERE and run.runtime.device_type() == "cpu":
        yield f"{run.named('batch')}: a CPU's limit is the whole process, and only tensors are forecast: fewer samples fit"
    if batch.grow_every:
        yield "batch.grow_every: an update is forecast as the first one, the smallest; the time of the run counts the growth"
    if job.composed.recipe is not None and job.composed.recipe.claim is not None:
        yield f"the recipe's own claim: {job.composed.recipe.claim}"


MOST_VALUES = 2.0**31  # bytes of weights that are made to look at a run: about five seconds
FILLED = 0.97  # of a device's memory that a run may fill
PROCESS = Uncertain(1.0, 0.95, 1.2)  # of what the process of a run holds when it is built, which grows with what it loads later
HEAP = Uncertain(0.4, 0.0, 0.8)  # of the tensors' peak: what a process keeps of freed memory, between tensors that live
DATA, NETWORK = "data", "network"
UNREADABLE = (RuntimeError, NotImplementedError, AssertionError, TypeError, ValueError, ArithmeticError, LookupError)


def of_process(tensors: Uncertain, beside: Uncertain) -> Uncertain:
    """The peak of a process on a CPU: its tensors' peak and the memory `beside` them; the tensors' peak alone where that is 0."""
    return tensors + beside + HEAP.times(tensors.value) if beside.value else tensors


@dataclass
class ForecastRow:
    """One override, and what it changes: the ratios of samples a second and of peak memory to the run's."""

    override: str
    speed: float | None = None
    memory: float | None = None
    step_s: float | None = None
    peak_bytes: float | None = None
    fits: bool | None = None
    why_not: str = ""  # it is not forecast


@dataclass
class Forecast:
    """The forecast of a run, or of a stage as if the whole run were like it. Seconds and bytes are those of one rank."""

    stage: str  # its title
    share: float  # of the run's updates
    device: str
    source: str
    ranks: int
    micro_batch: int
    micro_batches: int  # of an update
    peak_bytes: Uncertain  # that the run will print: that of the device's allocator, on a CPU that of the whole process
    tensors_bytes: Uncertain
    memory: dict[str, float]  # the bytes of its tensors by kind, and the workspace
    memory_limit_bytes: float
    fits: bool  # the likely peak does
    flops: float  # of an update
    moved_bytes: float  # read and written by an update's operations
    operations: int  # of an update
    step_s: Uncertain
    compute_s: Uncertain  # of an update's operations
    data_wait_s: Uncertain  # that an update waits for data
    network_s: Uncertain  # that it waits for other ranks
    shares: dict[str, float]  # of the time of an update, by what limits it
    timed_share: float  # of the operations' time, that was timed here; the rest is the roofline's
    limit: str  # what takes most of an update's time
    updates: int
    run_s: Uncertain  # without start, compiling and saving
    samples_per_second: float
    data_bytes_per_second: float
    largest_micro_batch: Uncertain | None  # that fits
    what_if: list[ForecastRow]
    notes: list[str]


@dataclass
class Subject:
    """A plan, and a trainer that was built for it here, with the device's limits."""

    plan: PlannedRun
    ranks: Ranks
    rehearsal: Rehearsal
    device: DeviceLimits
    beside: Uncertain  # bytes of a process on this machine's CPU without its tensors: Python, torch, the data
    timed: dict[str, roofline.Timed] = field(default_factory=dict)  # operations by signature, where it is this machine
    blocks: Sequence[torch.nn.Module] = ()  # recomputed in addition to the trainer's

    @classmethod
    def of(cls, plan: PlannedRun, trainer: Trainer) -> Subject:
        """The plan with its trainer."""
        beside, dtype = NOTHING, plan.run.precision.dtype
        if plan.values:
            from torch._subclasses.fake_tensor import FakeTensor

            kinds = rehearsal.resident(trainer).values()
            tensors = {id(t): t.nbytes for kind in kinds for t in kind if not isinstance(t, FakeTensor)}
            beside = PROCESS.times(max(0.0, memory_of_process() - sum(tensors.values())))
        device = roofline.this_device(trainer.device, (dtype,) if dtype else ()) if plan.here else roofline.known(plan.device)
        return cls(plan, plan.ranks(trainer.model), Rehearsal(trainer), device, beside)

    def record(self, size: int, blocks: Sequence[torch.nn.Module]) -> StepRecord:
        """The record of updates of micro-batches of this size. Raises UserError where the step needs values."""
        try:
            with nullcontext() if self.plan.here else rehearsal.CudaAutocast():
                return self.rehearsal.record(size, self.plan.micro_batches(), blocks)
        except UNREADABLE as error:
            why = str(error).strip().splitlines() or [""]
            raise UserError(
                f"the step cannot be recorded without values ({type(error).__name__}: {why[0][:200]}): a model or a loss reads "
                "its tensors on the host, or makes shapes of their values; `drivetrain doctor` measures such a run"
            ) from None

    def unmade(self) -> list[str]:
        """The note for weights that were too large to be made here."""
        nbytes = sum(p.nbytes for p in self.rehearsal.trainer.model.parameters())
        named = f"weights of {size(nbytes)} were not made: whether this CPU keeps layers in float32 was not measured"
        return [named] if nbytes > self.plan.values > 0 else []

    def limited(self) -> tuple[Subject, list[str]]:
        """The subject with the blocks that the run would recompute by checkpointing.memory_gb, and the note that says so.

        Raises UserError where that is too little.
        """
        run, size = self.plan.run, self.plan.micro_batch()
        if (most := run.checkpointing.memory_gb) is None:
            return self, []
        option, limit = Blocks.of(run), most * GIB
        blocks = blocks_for(run.named("checkpointing"), "checkpointing.block", self.rehearsal.trainer.model, option.block)
        count, nbytes = rehearsal.fewest(lambda n: rehearsal.peak_bytes(self.record(size, blocks[:n])), len(blocks), limit)
        if nbytes > limit:
            raise UserError(option.too_little({"blocks": len(blocks), "recomputed": count, "bytes": nbytes}, size))
        note = f"checkpointing.memory_gb: {count} of {len(blocks)} blocks are recomputed"
        return replace(self, blocks=blocks[:count]), [note]


def examine(subject: Subject, budget_s: float, largest: bool = False) -> Forecast:
    """Forecast a plan; `budget_s` seconds are for timing operations. The `largest` micro-batch is searched for if wanted."""
    subject, chosen = subject.limited()
    plan, trainer, device = subject.plan, subject.rehearsal.trainer, subject.device
    size, micro_batches, ranks = plan.micro_batch(), plan.micro_batches(), subject.ranks
    record, reading = subject.record(size, subject.blocks), 0.0
    operations = record.operations
    if plan.here:
        read = trainer.batch.micro_batch(trainer.parallel.data_world)  # samples, in one process: ranks take less each
        reading = roofline.reading_seconds(trainer) * size / read
        roofline.time_operations(operations, trainer.device, budget_s, subject.timed)
    own = {signature: timed.workspace for signature, timed in subject.timed.items()}
    at_most = max((nbytes + own.get(signature, 0) for signature, nbytes in record.most_during.items()), default=0)
    parts, tensors = peak_memory(record.peak, at_most, plan.here, ranks, device)
    peak = of_process(tensors, subject.beside)
    limit = GIB * (plan.run.batch.memory_gb or device.memory / GIB)
    precision = plan.run.precision
    tf32 = (*(("product", "attention") if precision.matmul in ("high", "medium") else ()), *(["convolution"] * precision.cudnn))
    took = roofline.step_time(operations, subject.timed, device, tf32, plan.compiled())
    nbytes = sent_bytes(float(record.peak[rehearsal.PARAMETERS]), ranks, micro_batches)
    network = roofline.network_seconds(nbytes, device, took.backward_s)
    waits = Uncertain(1.0, 0.7, 1.5).times(reading * micro_batches)
    step = took.seconds + waits + network
    shares = {limit: share * took.seconds.value / step.value for limit, share in took.shares.items()}
    shares |= {DATA: waits.value / step.value, NETWORK: network.value / step.value}
    evaluated = trainer.evaluator.samples() * (trainer.epochs // trainer.evaluate_every or 1)
    evaluation = Uncertain(1.0, 0.6, 1.6).times(took.forward_s / (size * micro_batches) * evaluated)
    pace, sample = plan.run.batch.size(0) / step.value, subject.rehearsal.sample.x
    return Forecast(
        stage="", share=1.0, device=plan.device, source=device.source, ranks=ranks.count, micro_batch=size,
        micro_batches=micro_batches, peak_bytes=peak, tensors_bytes=tensors, memory=parts, memory_limit_bytes=limit,
        fits=peak.value <= _room(device, limit), flops=sum(o.flops * times for o, times in operations.items()),
        moved_bytes=sum(o.nbytes * times for o, times in operations.items()), operations=operations.total(), step_s=step,
        compute_s=took.seconds, data_wait_s=waits, network_s=network, shares=shares, timed_share=took.timed_share,
        limit=max(shares, key=lambda name: shares[name]), updates=trainer.max_updates,
        run_s=step.times(_first_updates(trainer)) + evaluation, samples_per_second=pace,
        data_bytes_per_second=pace * trees.nbytes(sample) / trees.length(sample),
        largest_micro_batch=_largest(subject, at_most, limit) if largest and not plan.run.batch.buckets_lengths else None,
        what_if=[], notes=[*plan.notes, *chosen, *([] if plan.here else [roofline.host_note(plan.device)]), *subject.unmade()],
    )  # fmt: skip


def _first_updates(trainer: Trainer) -> float:
    """The number of a run's updates. Where its batch grows, one that is four times as large as the first counts as four."""
    batch, left, found = trainer.batch, trainer.max_updates, 0.0
    if not batch.grow_every:
        return float(left)
    for stretch in batch.stretches(trainer.epochs):
        updates = min(left, len(stretch) * batch.updates(trainer.batch.order.length, stretch.start, trainer.drop_last))
        left, found = left - updates, found + updates * batch.size(stretch.start) / batch.size(0)
    return found


def _room(device: DeviceLimits, limit: float) -> float:
    """The bytes that an allocator may hold, without those of the driver and libraries."""
    return FILLED * limit - device.reserved.value


def _largest(subject: Subject, at_most: float, limit: float) -> Uncertain | None:
    """The largest micro-batch whose peak fits, by the likely, the highest and the lowest forecast; None if none fits."""
    first = subject.plan.micro_batch()
    beside = max(0.0, at_most - sum(subject.record(first, subject.blocks).peak.values())) / first  # it grows with the micro-batch

    def peak(size: int) -> Uncertain:
        record = subject.record(size, subject.blocks)
        at_most = sum(record.peak.values()) + beside * size
        _, tensors = peak_memory(record.peak, at_most, subject.plan.here, subject.ranks, subject.device)
        return of_process(tensors, subject.beside)

    def crossing(size: int, which: int) -> float:
        """Where a line through the peaks at two sizes meets the limit: memory grows nearly so."""
        other = first if size != first else 2 * first
        at, slope = peak(size)[which], (peak(other)[which] - peak(size)[which]) / (other - size)
        return max(0.0, float(int(size + (room - at) / slope))) if slope > 0 else MOST

    room = _room(subject.device, limit)
    fits = peak(first).value <= room
    low, high = (first, int(min(MOST, 1.05 * crossing(first, 0)) + 1)) if fits else (min(2, first), first)
    size, _ = rehearsal.furthest(lambda size: peak(size).value, low, max(low, high), room)
    sizes = Uncertain(*(crossing(size, which) for which in (0, 2, 1)))
    return sizes if sizes.value >= 1 else None


GAIN = 1.1  # that counts as help: timings of the same operations differ by some per cent
SOUGHT_S = 20.0  # beyond the time, for a row that fits
ROW_S = 1.0  # of timing operations that are new in a row
RANKS = (2, 8)
SAME_MODEL = {"compile", "parallel", "batch"}  # groups that change nothing of the trainer as it is built to be looked at
RECOMPUTED = "checkpointing=blocks"  # its step is that of the trainer as it is, with all its blocks recomputed


def candidates(planned: PlannedRun) -> Iterator[str]:
    """Overrides that change speed or memory and not the training, without those that the run has.

    First those that help most to make a run fit, which are also quick to forecast: there may be no time for all.
    """
    run, steps = planned.run, 2 * planned.micro_batches()
    if not run.checkpointing.active:
        yield RECOMPUTED
    if run.batch.fixed_micro_batches and run.batch.size(0) % steps == 0:
        yield f"batch=accumulate batch.accumulation_steps={steps}"
    if run.parallel.one_process and not planned.here:
        for ranks in RANKS:
            yield f"parallel=fsdp parallel.nproc={ranks}"
    if not run.compile.active:
        yield "compile=inductor"
    if run.precision.full_float32:
        yield "precision=bf16"
    yield "checkpointing=none" if run.checkpointing.active else "checkpointing=selective"


def table(base: Forecast, subject: Subject, until: float) -> list[ForecastRow]:
    """Forecast each candidate that should be done in time, going by what others took; the others say so.

    Of a run that does not fit those of its own model are forecast until one fits, the first at least, the others for SOUGHT_S.
    """
    rows: list[ForecastRow] = []
    longest, sought = 0.0, not base.fits
    for override in candidates(subject.plan):
        began = time.perf_counter()
        seeks = sought and _same_model(override)
        if began + longest > until + SOUGHT_S * seeks and not (seeks and not rows):
            rows.append(ForecastRow(override, why_not="not forecast: the time was up (seconds=60 gives it more)"))
            continue
        rows.append(_row(override, base, subject))
        sought = sought and not rows[-1].fits
        longest = max(longest, time.perf_counter() - began)
    return rows


def _same_model(override: str) -> bool:
    return override == RECOMPUTED or groups_of(override.split()) <= SAME_MODEL


def _row(override: str, base: Forecast, subject: Subject) -> ForecastRow:
    own, trainer = subject.plan, subject.rehearsal.trainer
    samples, shown = own.run.batch.size(0), override
    try:
        changed = own.changed(override.split())
        if changed.run.batch.size(0) != samples:  # another option has another default, or misses a preset's
            shown += f" batch.global_batch={samples}"
            changed = own.changed(shown.split())
        with ExitStack() as undone:
            if not _same_model(override):
                trainer = child.built(changed.look(), changed.values, undone)
                subject = replace(Subject.of(changed, trainer), timed=subject.timed, beside=subject.beside)
            elif override == RECOMPUTED:
                subject = replace(subject, blocks=blocks_for(RECOMPUTED, "checkpointing.block", trainer.model, None))
            found = examine(replace(subject, plan=changed, ranks=changed.ranks(trainer.model)), ROW_S)
    except UserError as error:
        return ForecastRow(shown, why_not=error.problems[0])
    step, peak = found.step_s.value, found.tensors_bytes.value
    return ForecastRow(shown, base.step_s.value / step, peak / base.tensors_bytes.value, step, peak, found.fits)


MIB, GIB, MOST = 2**20, 2**30, 2.0**24  # and samples of a micro-batch


def as_dict(stages: Sequence[Forecast]) -> JsonObject:
    """The forecast as plain values. A figure is [value, low, high]; seconds, bytes and samples."""
    values = [asdict(each) for each in stages]
    if stages[0].stage:
        return {"fits": fits(stages), "run_s": whole(stages), "stages": values}
    return {name: value for name, value in values[0].items() if name not in ("stage", "share")}


def sheet_of(stages: Sequence[Forecast]) -> sheet.Sheet:
    """The forecast: whether the run fits and how long it takes, memory, time, and what one more override would change."""
    most = max(stages, key=lambda found: found.peak_bytes.high)
    memory = f"{_memory(most)} on {'this machine' if most.device == HERE else most.device}"
    takes = f"its peak memory is {memory}; it takes {_figure(whole(stages), seconds)}"
    titles = [
        f"stage {number} of {len(stages)}, {100 * each.share:.0f} % of the updates: {each.stage}" if each.stage else ""
        for number, each in enumerate(stages, 1)
    ]
    facts = [_facts(each) for each in stages]
    rows = [[name, *(each[name] for each in facts)] for name in facts[0] if any(each[name] for each in facts)]
    body: list[sheet.Section] = [sheet.Table(["", *titles], rows, "Forecast", titles)]
    for title, each in zip(titles, stages, strict=True):
        every, parts = sum(each.memory.values()) or 1, each.memory.items()
        kinds = [(kind, size(nbytes), f"{100 * nbytes / every:.0f} %") for kind, nbytes in parts]
        table = sheet.Table(("memory", "size", "share"), kinds, "Memory", bars={"size": [nbytes for _, nbytes in parts]})
        body += sheet.under(f"What takes the memory{title and f' in {title}'}", table)
        body += _what_if(each) if each.what_if else []
    notes = dict.fromkeys(note for each in stages for note in each.notes)
    if FORECAST_ONLY in most.source:
        notes["no step of this device was measured: the intervals are those of efficiencies that are usual in training"] = None
    body.append(sheet.words(*(f"note: {note}" for note in notes)))
    conclusion = f"The run {'fits' if most.fits else 'does NOT fit'}: {takes}"
    return sheet.Sheet("Memory and time before the start – drivetrain forecast", conclusion, body)


def _memory(found: Forecast) -> str:
    return f"{_figure(found.peak_bytes, size)} of {size(found.memory_limit_bytes)}"


def _facts(found: Forecast) -> dict[str, str]:
    """The forecast's remark on a figure, by its name; "" for none."""
    step, pace, peak, tensors = found.step_s, found.samples_per_second, found.peak_bytes, found.tensors_bytes
    samples, in_process, largest = round(pace * step.value), peak != tensors, found.largest_micro_batch
    split = f" in {found.micro_batches} micro-batches" if found.micro_batches > 1 else ""
    work = f"{found.flops / 1e9:,.4g} GFLOP, {found.moved_bytes / 1e9:,.3g} GB moved, {found.operations:,} operations"
    shares = sorted(found.shares.items(), key=lambda item: -item[1])
    named = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares if share > 0.005)
    beside = f"{_figure(tensors, size)}; outside them {size(peak.value - tensors.value)}, freed memory included"
    timed = f"{100 * found.timed_share:.0f} % of it, operation by operation; the rest is a roofline"
    return {
        "forecast for": f"{f'{found.ranks} × ' if found.ranks > 1 else ''}{found.device} ({found.source})",
        "an update has": f"{samples:,} samples: {math.ceil(samples / found.ranks):,} on each rank{split}",
        "peak memory": f"{_memory(found)}{', of the process, as the run prints it' if in_process else ''}",
        "peak of its tensors": beside if in_process else "",
        "largest micro-batch that fits": f"{_figure(largest, lambda n: f'{n:,.0f}')} samples" if largest else "",
        "an update": f"{_figure(step, seconds)}; {pace:,.0f} samples a second",
        "its work on each rank": f"{work}; {found.flops / step.value / 1e12:.3g} TFLOP/s",
        "limited by": f"{found.limit}: {named}",
        "timed here": timed if found.timed_share else "",
        "data needed": f"{pace:,.0f} samples a second, {size(found.data_bytes_per_second)}/s as the model gets them",
        "whole run": f"{_figure(found.run_s, seconds)} for {found.updates:,} updates and the evaluations",
    }


def _what_if(found: Forecast) -> list[sheet.Section]:
    cells = [
        [row.override, "", "", row.why_not] if row.why_not
        else [row.override, f"× {row.speed:.2f}", f"× {row.memory:.2f}", "" if row.fits else "does not fit"]
        for row in found.what_if
    ]  # fmt: skip
    table = sheet.Table(("what if", "speed", "memory", "note"), cells, "What if", ("note",)).used(3)
    lines = [f"{name}: {rows[0].override}" for name, rows in best(found).items() if rows]
    return [*sheet.under("One override more", table), sheet.words(*lines)]


def best(found: Forecast) -> dict[str, list[ForecastRow]]:
    """The rows that help, the one that helps most first."""
    # More micro-batches compute no less: what they seem to save is the error of timing other shapes.
    faster = [row for row in found.what_if if row.speed and row.speed > GAIN and not row.override.startswith("batch=")]
    smaller = [row for row in found.what_if if row.memory and row.memory < 1 / GAIN]
    return {
        "it fits with": [row for row in found.what_if if row.fits and not found.fits],
        "most speed": sorted(faster, key=lambda row: -(row.speed or 0)),
        "least memory": sorted(smaller, key=lambda row: row.memory or 0),
    }


def _figure(figure: Uncertain, show: Callable[[float], str]) -> str:
    return f"{show(figure.value)} ({show(figure.low)} … {show(figure.high)})"


def size(nbytes: float) -> str:
    """Bytes in few characters."""
    if nbytes >= GIB:
        return f"{nbytes / GIB:.3g} GiB"
    return f"{nbytes / MIB:.3g} MiB" if nbytes >= MIB / 10 else f"{nbytes / 1024:.3g} KiB"


def seconds(value: float) -> str:
    """A time in few characters, however short it is."""
    if value >= 1:
        return duration(value)
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} µs"


SPLITS = 3  # that are tried for batch=auto
LOOK_SHARE = 0.25  # of the time, for timing operations of the run itself


@dataclass
class ForecastSettings:
    """The settings of `drivetrain forecast`."""

    device: Literal[NAMES] = "here"  # type: ignore[valid-type]
    seconds: Positive = 20.0  # that it may take, approximately
    what_if: bool = True


def fits(stages: Sequence[Forecast]) -> bool:
    """True if the run, or each of its stages, fits the device's memory."""
    return all(each.fits for each in stages)


def whole(stages: Sequence[Forecast]) -> Uncertain:
    """The seconds of the run: of each stage its share."""
    return sum((each.run_s.times(each.share) for each in stages), NOTHING)


def command(argv: Sequence[str], config_dirs: Sequence[str] = (), as_json: bool = False) -> int:
    """Run `drivetrain forecast`; return its exit code: 1 where the run does not fit the device's memory."""
    settings, overrides = verbs.split([_quoted(word) for word in argv], ForecastSettings, "forecast")
    with Steps() as progress:
        progress("building the run, and recording its step on fake tensors")
        planned, stages = forecast(overrides, config_dirs, settings)
    if as_json:
        echo(json.dumps(as_dict(stages), indent=2))
    else:
        verbs.leave(planned.job, "forecast", sheet_of(stages), ["forecast", *argv], as_dict(stages))
    return DONE if fits(stages) else FAILED


def _quoted(word: str) -> str:
    """A device in lower case, as H100, and as a text: the name of one is a number, 4090."""
    key, _, value = word.partition("=")
    return f"device='{value.lower()}'" if key == "device" else word


def forecast(
    overrides: Sequence[str], config_dirs: Sequence[str] = (), settings: ForecastSettings | None = None
) -> tuple[PlannedRun, list[Forecast]]:
    """Forecast a run, or each of its stages; return what was planned, and the forecasts. Raises UserError."""
    settings, until = settings or ForecastSettings(), time.perf_counter()
    planned = plan(overrides, config_dirs, settings.device)
    stages, found = planned.stages() or [("", 1.0, planned)], []
    if planned.run.stages:  # what-if is of a run with one config
        settings = replace(settings, seconds=settings.seconds / len(stages), what_if=False)
    for title, share, each in stages:
        until += settings.seconds
        question = partial(answer, each, settings, until)
        built = child.ask(each.look(), question, "the run cannot be forecast", values=each.values)
        found.append(replace(built, stage=title, share=share))
    return planned, found


def answer(planned: PlannedRun, settings: ForecastSettings, until: float, trainer: Trainer) -> Forecast:
    """Forecast a plan whose trainer is built, in this process; by `until` of time.perf_counter() it should be done."""
    subject, budget_s, batch = Subject.of(planned, trainer), LOOK_SHARE * settings.seconds, planned.run.batch
    found = examine(subject, budget_s, largest=True)
    for _ in range(SPLITS if batch.untried and not batch.needs_trial else 0):
        # The run finds its micro-batches by trials before it starts: as many as it takes to fit. Gradients that wait for the next
        # one take memory too, so that the largest micro-batch becomes smaller with the first split.
        if not found.fits and found.largest_micro_batch is not None:
            steps = math.ceil(batch.size(0) / planned.run.parallel.data_ranks() / max(1, int(found.largest_micro_batch.value)))
            subject = replace(subject, plan=replace(planned, steps=steps))
            found = examine(subject, budget_s, largest=True)
    return replace(found, what_if=table(found, subject, until) if settings.what_if else [])

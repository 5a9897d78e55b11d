"""The plan of a forecast: the run as it is planned, and the same run as one process can build it, uncompiled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain.config import validate
from drivetrain.core import stages as of_run
from drivetrain.core.blocks import repeated_blocks
from drivetrain.core.errors import UserError
from drivetrain.core.option import RunSpec
from drivetrain.core.overrides import format_value
from drivetrain.engine.rehearsal.fake_step import BATCH, GRADIENTS, PARAMETERS, STATE
from drivetrain.engine.rehearsal.recorder import OTHER
from drivetrain.launch.job import Job
from drivetrain.measure.benchmark import variants
from drivetrain.measure.changes import apply
from drivetrain.measure.forecast.replay import (
    ASKED_HOST,
    COMPILED_HOST,
    EAGER,
    FUSED_BYTES,
    HERE,
    RECORDED_HOST,
    Compiled,
    Device,
    Figure,
)
from drivetrain.parallel import Parallel
from drivetrain.precision import Precision

if TYPE_CHECKING:
    import torch

KINDS = (PARAMETERS, GRADIENTS, STATE, OTHER, BATCH)
COUNTED = (0.97, 1.04)  # of the peak of what was counted on this machine, where kernels' own buffers were measured
ELSEWHERE = (0.90, 1.15)  # where another device has other kernels
ALLOWANCE = Figure(0.05, 0.0, 0.15)  # of the activations, for kernels' own buffers where these were not measured


@dataclass(frozen=True)
class Ranks:
    """The layout of a run over ranks, as far as memory and network depend on it."""

    count: int = 1
    shards: int = 1  # over which weights, gradients and optimizer state are divided
    keeps_gathered: bool = False  # whole weights stay between forward and backward
    whole_gradients: bool = False  # gradients are divided only at an update's last micro-batch
    offloaded: bool = False  # a rank's own part of them is in the host's memory
    largest_block: float = 0.0  # bytes of the weights of the largest block that is gathered at once


class Memory(NamedTuple):
    """The peak of one rank."""

    parts: dict[str, float]  # bytes by kind, and the workspace
    peak: Figure


def peak_memory(counted: Mapping[str, int], at_most: float, measured: bool, ranks: Ranks, device: Device) -> Memory:
    """Return the peak. `counted` are bytes by kind; `at_most` those with kernels' own buffers, where they were `measured`."""
    parts: dict[str, float] = {kind: float(counted.get(kind, 0)) for kind in KINDS}
    parts = sharded(parts, ranks)
    factors = COUNTED if measured else ELSEWHERE
    if measured:
        workspace = Figure.exactly(max(0.0, at_most - sum(counted.values())))
    else:
        workspace = device.reserved + ALLOWANCE.times(parts[OTHER])
    whole = sum(parts.values())
    parts["workspace"] = workspace.value + (device.fragmentation.value - 1) * whole
    low, high = factors[0] * device.fragmentation.low, factors[1] * device.fragmentation.high
    return Memory(parts, Figure(sum(parts.values()), low * whole + workspace.low, high * whole + workspace.high))


def sharded(parts: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
    """Divide what the ranks share. A block's weights are gathered while the one before it computes, its gradients are whole."""
    n = ranks.shards
    if n == 1 and not ranks.offloaded:
        return dict(parts)
    own = 0.0 if ranks.offloaded else 1 / n  # of what is divided
    gathered = parts[PARAMETERS] if ranks.keeps_gathered else 2 * ranks.largest_block
    gradients = parts[GRADIENTS] if ranks.whole_gradients else own * parts[GRADIENTS] + ranks.largest_block
    return {
        **parts,
        PARAMETERS: own * parts[PARAMETERS] + gathered,
        GRADIENTS: gradients,
        STATE: own * parts[STATE],
    }


def sent_bytes(parameters: float, ranks: Ranks, micro_batches: int) -> float:
    """Bytes that a rank sends in an update: one all-reduce of gradients, or gathering weights twice and dividing gradients."""
    if ranks.count == 1:
        return 0.0
    share = (ranks.count - 1) / ranks.count
    if ranks.shards == 1:
        return 2 * share * parameters
    gathers = micro_batches * (1 if ranks.keeps_gathered else 2)
    return share * parameters * (gathers + 1)


ALONE = ("parallel=single", "compile=none", "debug=none", "logger=[files]")  # as it is built to be looked at


@dataclass(frozen=True)
class Plan:
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

    def micro_batches(self) -> int:
        """Micro-batches of an update on one rank."""
        return self.steps or int(self.run.batch.accumulation_steps)

    def micro_batch(self) -> int:
        """Samples of one rank's forward."""
        return -(-int(self.run.batch.size(0)) // (self.micro_batches() * int(self.run.parallel.data_ranks())))

    @property
    def finds_split(self) -> bool:
        """True if the run finds its micro-batches by trials before it starts, as batch=auto does."""
        return bool(self.run.batch.untried) and not self.run.batch.needs_trial

    def split(self, largest: float) -> Plan:
        """The plan of batch=auto, whose micro-batches have at most so many samples."""
        samples = math.ceil(self.run.batch.size(0) / self.run.parallel.data_ranks())
        return replace(self, steps=math.ceil(samples / max(1, int(largest))))

    @property
    def times_layers(self) -> bool:
        """True if the run times layers of its model on this machine's CPU when it is built, so that its weights need values."""
        return self.device == HERE and self.run.runtime.device_type() == "cpu"

    def look(self) -> RunSpec:
        """The run that is built here. For another device no layer is timed for this CPU's sake."""
        changes = [*ALONE, *(["runtime.device=cpu"] if self.device != HERE else [])]
        checkpointing = self.run.checkpointing
        if checkpointing.chosen_by_compiler or checkpointing.keeps_on_host or checkpointing.memory_gb is not None:
            changes.append("checkpointing=none")
        if not self.run.batch.fixed_micro_batches and not self.run.batch.buckets_lengths:  # batch=auto finds its own
            changes.append("batch=fixed")
        run = variants.prepare_without_saving(apply(self.overrides, changes, self.config_dirs), self.config_dirs)[1].run
        return run.with_parts(precision=Precision.of(run).with_values(looks_for_slow_layers=self.times_layers))

    def stages(self) -> list[tuple[str, float, Plan]]:
        """Each stage: its title, its share of the run's updates, and a run that is like it from beginning to end."""
        found = []
        for stage, (_, share) in zip(self.run.stages, of_run.alone(self.run), strict=True):
            words = ["stages=null", *(f"{key}={format_value(value)}" for key, value in stage.changes.items())]
            overrides = apply(self.overrides, words, self.config_dirs)
            found.append((stage.title, share, plan(overrides, self.config_dirs, self.device)))
        return found

    def compiled(self) -> Compiled:
        """The savings that compiling is assumed to bring, and the cost of a policy that is asked for each operation."""
        option = self.run.compile
        if not option.active or option.torchscript:
            return Compiled(host=ASKED_HOST) if self.run.checkpointing.asks_for_each_operation else EAGER
        recorded = option.captures_step or option.cuda_graphs
        host = RECORDED_HOST if recorded else COMPILED_HOST
        return Compiled(FUSED_BYTES if option.partitions_activations or option.captures_step else Figure.exactly(1.0), host)

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
        shards = parallel.weight_shards()
        blocks = repeated_blocks(model, getattr(parallel, "block", None)) or [model]
        largest = max(sum(p.nbytes for p in block.parameters()) for block in blocks)
        return Ranks(
            count, shards, keeps_gathered=not getattr(parallel, "reshard_after_forward", True), largest_block=largest,
            offloaded=getattr(parallel, "offload", False),
            whole_gradients=self.micro_batches() > 1 and not getattr(parallel, "sync_each_micro", False),
        )  # fmt: skip


def plan(overrides: Sequence[str], config_dirs: Sequence[str], device: str) -> Plan:
    """Validate a run that is planned. Raises UserError."""
    _, job = variants.prepare_without_saving(overrides, config_dirs)
    if device == HERE:
        validate.validate_device(job.run)
    if (tokens := job.run.batch.tokens) is not None:
        raise UserError(
            f"batch.tokens={tokens}: how many samples that is, only reading them tells: set batch.tokens=null, and "
            "batch.global_batch to the samples of an update"
        )
    notes = [*_notes(job.run, device)]
    recipe = job.composed.recipe
    if recipe is not None and recipe.claim is not None:
        notes.append(f"the recipe's own claim: {recipe.claim}")
    return Plan(tuple(overrides), tuple(config_dirs), job, device, tuple(notes))


def _notes(run: RunSpec, device: str) -> Iterator[str]:
    """The notes on what the forecast does not cover, or assumes."""
    if run.checkpointing.chosen_by_compiler:
        yield "checkpointing=budget is the compiler's to choose: the peak is forecast with every activation kept"
    if run.checkpointing.keeps_on_host:
        yield f"{run.named('checkpointing')} is not recorded: the peak is forecast with every activation on the device"
    if getattr(run.parallel, "offload", False):
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
        yield f"{run.named('batch')}: on a CPU its limit is for the process, of which the tensors are forecast: fewer samples fit"
    if batch.grow_every:
        yield "batch.grow_every: an update is forecast as the first one, the smallest; the time of the run counts the growth"

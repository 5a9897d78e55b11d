"""Trials of options before the ranks of a run start: each in a separate process, which may run out of memory."""

from __future__ import annotations

import logging
import math
import os
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from ctypes import c_int
from functools import partial
from multiprocessing.sharedctypes import RawValue
from typing import TYPE_CHECKING, TypeVar

from drivetrain.batch import Batch
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine.device import is_out_of_memory, memory_now, peak_memory_of_process, synchronize
from drivetrain.core.machine.forking import Died, NoAnswer
from drivetrain.core.options.option import RunSpec
from drivetrain.core.options.overrides import key_of
from drivetrain.core.step.microbatch import MicroBatch, one_update
from drivetrain.core.typed import JsonObject
from drivetrain.core.world import World
from drivetrain.engine import child
from drivetrain.launch.job import Job, prepare, recorded_environment

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer


NEVER = 2**62  # updates between two measured ones
SHARE, FEWEST, MOST = 30, 50, 200  # updates of the run per update of the look, and the look's limits
TIMED = 3  # updates of each size; the fastest counts, because other programs only slow them down


def make_update(trainer: Trainer, batches: Iterable[MicroBatch], loss: torch.Tensor) -> bool:
    """Make an update of these micro-batches; False if it was skipped."""
    for batch in batches:
        trainer.step.micro_batch(batch, loss)
    made = bool(trainer.step.update())
    trainer.step.zero_grad()
    return made


def at_beginning(trainer: Trainer, updates: int | None) -> JsonObject:
    """Train the run's first updates, and measure the noise at each. `updates` None: a share of the run."""
    noise, made = trainer.log.noise, 0
    assert noise is not None
    noise.every = 1
    updates = min(updates or min(MOST, max(FEWEST, trainer.max_updates // SHARE)), trainer.max_updates)
    trainer.model.train()
    loss = torch.zeros((), device=trainer.device)
    stream = trainer.read()
    for _ in range(updates):
        trainer.scheduler.step(made)
        made += make_update(trainer, one_update(stream), loss)
    noise.every = NEVER
    variance, squared = noise.sums.tolist()
    return {"noise_scale": noise.scale(variance, squared, 0), "updates": updates, "samples": trainer.batch.order.length}


def update_seconds(trainer: Trainer, micro_batches: Sequence[int], steps: int, noise_scale: float | None) -> list[float]:
    """The seconds of an update of `steps` micro-batches for each of these ascending sizes, as far as data and memory go.

    The first has the run's smallest batch. It ends when no larger batch can reach a target sooner: when one update takes as long
    as the fewest possible updates of the best batch so far.
    """
    from drivetrain.batch.auto import relative_times

    found: list[float] = []
    smallest, samples = trainer.batch.global_batch, trainer.batch.order.length
    for micro_batch in micro_batches:
        if noise_scale is None or smallest * micro_batch // micro_batches[0] > samples:
            break
        try:
            found.append(min(_timed(trainer, micro_batch, steps)))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            break
        if found[-1] >= min(relative_times(noise_scale, smallest, found)):
            break
    return found


def _timed(trainer: Trainer, micro_batch: int, steps: int) -> Iterator[float]:
    """The seconds of several updates of `steps` micro-batches, on data already on the device."""
    batch = copy(trainer.batch)
    batch.global_batch, batch.accumulation_steps = micro_batch * steps, steps
    requests = batch.requests(trainer.seed, 0, trainer.parallel.data_world, trainer.drop_last)
    update, loss = list(trainer.read(one_update(requests))), torch.zeros((), device=trainer.device)
    for _ in range(TIMED):
        synchronize(trainer.device)
        began = time.perf_counter()
        make_update(trainer, update, loss)
        synchronize(trainer.device)
        yield time.perf_counter() - began


OUT_OF_MEMORY = 3  # the exit code of a trial above its memory limit
MEMORY_FRACTION = 0.95  # share of a device's memory; the rest is for fragmentation and the ranks' communication
FORECAST_S = 120.0  # seconds of the forecast; without its answer, trials begin with the smallest size
THREAD_ROUNDS, LONG_S = 7, 0.5  # rounds of trials of threads; seconds of an update worth all cores
LOOKS_ALONE = ("callbacks=[]", "logger=[]", "ema=none")

T = TypeVar("T")

logger = logging.getLogger(__name__)


class JobTrials:
    """The trials of a job; core.options.protocols.Trials lists an option's possible requests."""

    def __init__(self, job: Job) -> None:
        self.job, self.run, self.resumes = job, job.run, job.checkpoint is not None

    def forecast_micro_batch(self, most: int, limit_gb: float | None) -> int | None:
        try:
            question = partial(_forecast_micro_batch, most, limit_gb)
            return child.ask(trial_run(self.job), question, "it fails", FORECAST_S, values=0)
        except UserError as error:
            why = error.problems[-1][:200]
            logger.info("%s: the step cannot be forecast (%s): trials begin at 2 samples", self.run.named("batch"), why)
            return None

    def count_fitting(self, sizes: Sequence[int], most: int, limit_gb: float | None) -> int:
        fitting: c_int = RawValue("i", 0)  # in shared memory, because the system may kill the other process
        try:
            child.ask(trial_run(self.job), partial(_try, sizes, most, limit_gb, fitting), "batch=auto: a trial step failed")
        except Died:
            logger.debug("a trial was ended at more than %d sizes", fitting.value)
        return int(fitting.value)

    def look(self, steps: int, updates: int | None, micro_batches: Sequence[int]) -> JsonObject:
        run = trial_run(self.job, LOOKS_ALONE)
        question = partial(_look, updates, micro_batches, run.batch.accumulation_steps)
        run = run.with_parts(batch=Batch.of(run).with_values(accumulation_steps=steps))
        return child.ask(run, question, "the look at the first updates for the batch failed")

    def micro_batch(self) -> int:
        return int(self.run.batch.micro_batch(World(size=self.run.parallel.data_ranks())))

    def thread_seconds(self, counts: Sequence[int]) -> list[float]:
        run, steps = trial_run(self.job, LOOKS_ALONE), self.run.batch.accumulation_steps
        return child.ask(run, partial(_thread_seconds, counts, self.micro_batch(), steps), "runtime.threads=auto: a trial failed")

    def fewest_blocks(self, block: str | None, limit_gb: float) -> dict[str, int]:
        run, steps = trial_run(self.job, ["checkpointing=none"]), self.run.batch.accumulation_steps
        question = partial(_fewest_blocks, block, self.micro_batch(), steps, limit_gb)
        try:
            return child.ask(run, question, "the step cannot be forecast", values=0)
        except NoAnswer as error:
            raise UserError(f"{error}: set checkpointing.memory_gb=null") from None


def choose(job: Job) -> None:
    """Let the options choose values by trials. A resumed run takes them from its directory."""
    recorded = recorded_environment(job.run_dir) if job.run_dir is not None else {}
    for group, option in job.run.tried().items():
        job.run = job.run.with_parts(**{group: option.returned("choose", option.choose(JobTrials(job), recorded.get(group)))})


def trial_run(job: Job, more: Sequence[str] = ()) -> RunSpec:
    """The job's run as one process that keeps nothing, with `more` overrides."""
    # Not compiled: a graph for each size would take minutes and further memory.
    off = ["parallel=single", "compile=none", "debug=none", *more]
    # Averages stored with checkpoints need an option that saves; a trial saves nothing.
    off.append("saving=last" if job.run.saving.active else "saving=none")
    if job.run.checkpointing.chosen_by_compiler:
        off.append("checkpointing=none")  # without the compiler all activations are kept
    groups = {override.partition("=")[0] for override in off}
    overrides = [override for override in job.composed.overrides if key_of(override).split(".")[0] not in groups]
    return prepare([*overrides, *dict.fromkeys(off)], job.composed.config_dirs).run


def limit_memory(device: torch.device, limit_gb: float | None = None) -> None:
    """Let this process use at most a fixed share of a device's memory, and no more than the limit."""
    if device.type != "cpu":
        torch.get_device_module(device).set_per_process_memory_fraction(device_limit(device, limit_gb) / _total(device))


def device_limit(device: torch.device, limit_gb: float | None) -> float:
    """The bytes that a trial may allocate on an accelerator."""
    most = MEMORY_FRACTION * _total(device)
    return min(most, limit_gb * 2**30) if limit_gb else most


def _total(device: torch.device) -> float:
    if device.type == "mps":
        return float(torch.mps.recommended_max_memory())
    return float(torch.get_device_module(device).get_device_properties(device).total_memory)


# The rest runs in the process of a trial.


def _forecast_micro_batch(most: int, limit_gb: float | None, trainer: Trainer) -> int:
    from drivetrain.engine.rehearsal import largest_micro_batch

    if trainer.device.type != "cpu":
        return largest_micro_batch(trainer, most, device_limit(trainer.device, limit_gb))
    assert limit_gb is not None  # Auto.validate_device
    # Libraries and data are in the process's memory too, but not the model's weights, which have no values here.
    return largest_micro_batch(trainer, most, limit_gb * 2**30 - memory_now())


def _try(sizes: Sequence[int], most: int, limit_gb: float | None, fitting: c_int, trainer: Trainer) -> None:
    """Go through the sizes in ascending order until memory runs out."""
    limit = limit_gb * 2**30 if limit_gb and trainer.device.type == "cpu" else math.inf  # of this process
    if limit < math.inf:
        threading.Thread(target=_exit_above, args=(limit,), daemon=True).start()
    limit_memory(trainer.device, limit_gb)
    for size in sizes:
        try:
            _make_updates(trainer, size, 2 if size < most else 1)
        except RuntimeError as error:
            if is_out_of_memory(error):
                return
            raise
        if peak_memory_of_process() > limit:
            return
        fitting.value += 1


def _thread_seconds(counts: Sequence[int], size: int, micro_batches: int, trainer: Trainer) -> list[float]:
    """The median seconds of an update for each number of threads, measured in turns."""

    def timed(threads: int) -> float:
        torch.set_num_threads(threads)
        _make_updates(trainer, size, micro_batches)  # it starts the threads
        began = time.perf_counter()
        _make_updates(trainer, size, micro_batches)
        return (time.perf_counter() - began) / 2

    if timed(counts[-1]) > LONG_S < timed(counts[0]):
        return []
    rounds = [[timed(threads) for threads in counts] for _ in range(THREAD_ROUNDS)]
    return [statistics.median(each) for each in zip(*rounds, strict=True)]


def _make_updates(trainer: Trainer, size: int, micro_batches: int) -> None:
    """Make two updates. In the second one the optimizer has its state, and later micro-batches find gradients."""
    for count in (1, micro_batches):
        for _ in range(count):
            trainer.forward_backward(size)
        trainer.step.update()
        trainer.step.zero_grad()


def _exit_above(limit: float) -> None:
    """Exit as if out of memory once this process has used more than `limit` bytes."""
    while peak_memory_of_process() <= limit:
        time.sleep(0.005)
    os._exit(OUT_OF_MEMORY)


def _look(updates: int | None, micro_batches: Sequence[int], own_steps: int, trainer: Trainer) -> JsonObject:
    limit_memory(trainer.device)
    found = at_beginning(trainer, updates)
    return {**found, "update_seconds": update_seconds(trainer, micro_batches, own_steps, found["noise_scale"])}


def _fewest_blocks(block: str | None, micro_batch: int, steps: int, limit_gb: float, trainer: Trainer) -> dict[str, int]:
    from drivetrain.core.step.blocks import blocks_for
    from drivetrain.engine.rehearsal import Rehearsal, fewest, peak_bytes

    blocks, rehearsal = blocks_for("checkpointing=blocks", "checkpointing.block", trainer.model, block), Rehearsal(trainer)

    def peak_with(count: int) -> float:
        return peak_bytes(rehearsal.record(micro_batch, steps, blocks[:count]))

    recomputed, peak = fewest(peak_with, len(blocks), limit_gb * 2**30)
    return {"blocks": len(blocks), "recomputed": recomputed, "bytes": int(peak)}

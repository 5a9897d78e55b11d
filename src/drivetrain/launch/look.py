"""The beginning of a run, in a process that looks at it: its gradient noise scale, and the time of updates of several sizes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

NEVER = 2**62  # updates between two that are measured
SHARE, FEWEST, MOST = 30, 50, 200  # updates of the run for one of the look, and the look's limits
TIMED = 3  # updates of each size, of which the fastest counts: other programs only make one slower


def at_beginning(trainer: Trainer, updates: int | None) -> dict[str, Any]:
    """Train for some updates as the run begins, every one of them measured. None: a share of the run."""
    import torch

    noise, step = trainer.log.noise, trainer.step
    assert noise is not None
    noise.every = 1
    updates = min(updates or min(MOST, max(FEWEST, trainer.max_updates // SHARE)), trainer.max_updates)
    trainer.model.train()
    loss, done, made = torch.zeros((), device=trainer.device), 0, 0
    stream = trainer.loader.stream(trainer.train_data, trainer.requests(), trainer.device, trainer.memory_format)
    for batch in stream:
        trainer.scheduler.step(made)
        step.micro_batch(batch, loss)
        if not batch.last:
            continue
        done += 1
        made += step.update()
        step.zero_grad()
        if done == updates:
            break
    noise.every = NEVER
    variance, squared = noise.sums.tolist()
    return {"noise_scale": noise.scale(variance, squared, 0), "updates": done, "samples": len(trainer.train_data.source)}


def update_seconds(trainer: Trainer, micro_batches: Sequence[int], steps: int, noise_scale: float | None) -> list[float]:
    """The seconds of an update of so many steps with each of these ascending micro-batches, as far as data and memory go.

    The first is of the run's smallest batch. It ends where no larger batch can come to a target sooner: where one update takes
    as long as the best batch so far takes for the fewest possible.
    """
    from drivetrain.batch.critical import relative_times
    from drivetrain.core.device import is_out_of_memory

    found: list[float] = []
    smallest, samples = trainer.batch.global_batch, len(trainer.train_data.source)
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
    """The seconds of several updates of so many steps, on data that is on the device already."""
    import torch

    from drivetrain.core.device import synchronize
    from drivetrain.core.microbatch import one_update

    batch, step = copy(trainer.batch), trainer.step
    batch.global_batch, batch.accumulation_steps = micro_batch * steps, steps
    requests = batch.requests(trainer.seed, 0, trainer.parallel.data_world, trainer.drop_last)
    stream = trainer.loader.stream(trainer.train_data, one_update(requests), trainer.device, trainer.memory_format)
    update, loss = list(stream), torch.zeros((), device=trainer.device)
    for _ in range(TIMED):
        synchronize(trainer.device)
        began = time.perf_counter()
        for each in update:
            step.micro_batch(each, loss)
        step.update()
        step.zero_grad()
        synchronize(trainer.device)
        yield time.perf_counter() - began

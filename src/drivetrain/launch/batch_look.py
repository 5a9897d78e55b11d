"""A short look at a run's beginning, in a process of its own: its gradient noise scale. The run itself is not touched.

The parent calls `measure`. The child (`python -m drivetrain.launch.batch_look`) trains for some updates on one device, measures
every one of them, and prints what it found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import UserError
from drivetrain.launch import batch_probe

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer


def measure(overrides: Sequence[str], config_dirs: Sequence[str], steps: int, updates: int) -> dict[str, Any]:
    """What some updates of so many micro-batches tell: noise_scale, updates, and the samples of the training set."""
    task = {"overrides": list(overrides), "config_dirs": list(config_dirs), "steps": steps, "updates": updates}
    done = batch_probe.run_child("drivetrain.launch.batch_look", task)
    if done.returncode:
        raise UserError(f"batch=critical: its look at the first updates failed: {batch_probe.last_line(done)}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def look(trainer: Trainer, updates: int) -> dict[str, Any]:
    """Train for some updates as the run begins, every one of them measured."""
    import torch

    noise, step = trainer.log.noise, trainer.step
    assert noise is not None
    noise.every = 1
    trainer.model.train()
    trainer.scheduler.step(0)
    loss, done = torch.zeros((), device=trainer.device), 0
    stream = trainer.loader.stream(trainer.train_data, trainer.requests(), trainer.device, trainer.memory_format)
    for batch in stream:
        step.micro_batch(batch, loss)
        if not batch.last:
            continue
        done += 1
        if step.update():
            trainer.scheduler.step(done)
        step.zero_grad()
        if done == updates:
            break
    variance, squared = noise.sums.tolist()
    return {"noise_scale": noise.scale(variance, squared, 0), "updates": done, "samples": len(trainer.train_data.source)}


def main() -> None:
    """The child: read the task from standard input, and look."""
    task = batch_probe.receive_task()
    from drivetrain.core.context import BuildContext
    from drivetrain.core.world import World
    from drivetrain.engine import build

    job = batch_probe.trial_job(task, ["callbacks=[]", "logger=[]", "ema=none"])
    job.run.batch.accumulation_steps = task["steps"]
    trainer = build.build(BuildContext(job.run, World(), Path(os.devnull)), [])
    print(json.dumps(look(trainer, min(task["updates"], trainer.max_updates))), flush=True)


if __name__ == "__main__":
    main()

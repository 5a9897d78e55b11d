"""Forecasts the largest micro-batch that fits, in a process of its own, so that trials begin near it.

The parent calls `largest_micro_batch`. The child (`python -m drivetrain.launch.batch_forecast`) builds the run, makes its step on
tensors without values, and prints the size. A wrong forecast costs trials, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain.launch import batch_probe

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

LIMIT_S = 120.0  # after that trials begin with the smallest size

logger = logging.getLogger(__name__)


def largest_micro_batch(overrides: Sequence[str], config_dirs: Sequence[str], most: int, limit_gb: float | None) -> int | None:
    """The samples, at most `most`, that are forecast to fit, 0 for none; None where it cannot be told, which is logged."""
    task = {"overrides": list(overrides), "config_dirs": list(config_dirs), "most": most, "limit_gb": limit_gb}
    done = batch_probe.run_child("drivetrain.launch.batch_forecast", task, LIMIT_S)
    if done.returncode:
        logger.info("batch=auto: the step cannot be forecast (%s): trials begin at 2 samples", batch_probe.last_line(done)[:200])
        return None
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    """The child: read the task from standard input, and forecast."""
    task = batch_probe.receive_task()
    from drivetrain.core.context import NO_RUN_DIR, BuildContext
    from drivetrain.core.world import World
    from drivetrain.engine import build
    from drivetrain.engine.rehearsal.largest import largest_micro_batch as largest

    job = batch_probe.trial_job(task)
    trainer = build.build(BuildContext(job.run, World(), NO_RUN_DIR), [])
    print(largest(trainer, task["most"], _for_tensors(trainer, task["limit_gb"])), flush=True)


def _for_tensors(trainer: Trainer, limit_gb: float | None) -> float:
    """The bytes that the step's tensors may take; a process on a CPU has its libraries and the data beside them."""
    from drivetrain.core.device import memory_now
    from drivetrain.engine.rehearsal.fake_step import resident

    if trainer.device.type != "cpu":
        return batch_probe.device_limit(trainer.device, limit_gb)
    assert limit_gb is not None  # Auto.validate_device
    tensors = {id(t): t.nbytes for kind in resident(trainer).values() for t in kind}
    return limit_gb * 2**30 - (memory_now() - sum(tensors.values()))


if __name__ == "__main__":
    main()

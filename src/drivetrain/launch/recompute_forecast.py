"""Forecasts how many blocks must be recomputed for a step to fit, in a process of its own. The run itself is not touched.

The parent calls `fewest_blocks`. The child (`python -m drivetrain.launch.recompute_forecast`) builds the run, makes its step on
tensors without values with more or fewer blocks recomputed, and prints what it found.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from drivetrain.core.errors import UserError
from drivetrain.launch import batch_probe

KEY = "checkpointing.memory_gb"


class Share(NamedTuple):
    """What one rank computes of an update."""

    micro_batch: int  # samples
    micro_batches: int


def fewest_blocks(
    overrides: Sequence[str], config_dirs: Sequence[str], share: Share, block: str | None, memory_gb: float
) -> dict[str, Any]:
    """The fewest blocks whose recomputation lets a rank's step fit: memory_gb, blocks, recomputed, and the bytes of the step.

    Raises UserError where it does not fit at all, with the least that it takes, and where the step cannot be forecast.
    """
    task = {
        "overrides": list(overrides), "config_dirs": list(config_dirs), "block": block, "memory_gb": memory_gb, **share._asdict()
    }  # fmt: skip
    done = batch_probe.run_child("drivetrain.launch.recompute_forecast", task)
    if done.returncode:
        raise UserError(f"{KEY}={memory_gb:g}: the step cannot be forecast ({batch_probe.last_line(done)}): set {KEY}=null")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return within(memory_gb, share.micro_batch, found)


def within(memory_gb: float, micro_batch: int, found: dict[str, Any]) -> dict[str, Any]:
    """Return what was found with its limit. Raises UserError where the step takes more, with the least that is enough."""
    if found["bytes"] > memory_gb * 2**30:
        raise UserError(
            f"{KEY}={memory_gb:g} is too little: a step of {micro_batch} samples is forecast to take at least "
            f"{rounded_up(found['bytes'] / 2**30):g} GiB, with {found['recomputed']} of {found['blocks']} blocks recomputed: "
            "raise it, or split the update into more micro-batches (batch=accumulate)"
        )
    return {"memory_gb": memory_gb, **found}


def rounded_up(value: float) -> float:
    """Three digits of a positive number, and no less than it."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    rounded = float(f"{value:.3g}")
    return rounded if rounded >= value else float(f"{rounded + unit:.3g}")


def main() -> None:
    """The child: read the task from standard input, and forecast."""
    task = batch_probe.receive_task()
    from drivetrain.core.blocks import blocks_for
    from drivetrain.core.context import NO_RUN_DIR, BuildContext
    from drivetrain.core.world import World
    from drivetrain.engine import build
    from drivetrain.engine.rehearsal.recomputation import fewest_recomputed

    job = batch_probe.trial_job(task, ["checkpointing=none"])
    trainer = build.build(BuildContext(job.run, World(), NO_RUN_DIR), [])
    blocks = blocks_for("checkpointing=blocks", "checkpointing.block", trainer.model, task["block"])
    limit = task["memory_gb"] * 2**30
    recomputed, peak = fewest_recomputed(trainer, blocks, task["micro_batch"], task["micro_batches"], limit)
    print(json.dumps({"blocks": len(blocks), "recomputed": recomputed, "bytes": int(peak)}), flush=True)


if __name__ == "__main__":
    main()

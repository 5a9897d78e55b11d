"""Derives batch size stages from a run's logged gradient noise scale, and writes them (batch.plan=noise)."""

from __future__ import annotations

import logging
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from drivetrain.batch.base import Batch
from drivetrain.core.machine import files
from drivetrain.core.typed import JsonObject
from drivetrain.recipe import write
from drivetrain.run import records

NAME = "planned.yaml"
logger = logging.getLogger(__name__)


def stages(noise: Sequence[tuple[int, float]], epochs: int, smallest: int, most: int) -> list[tuple[int, int]]:
    """The end epoch and batch of each stage, from the noise scales of epochs.

    A batch is the smallest one, doubled as often as its epoch's median and `most` allow. It never falls.
    """
    sizes = [smallest]
    for epoch in range(epochs):
        found = statistics.median([scale for at, scale in noise if at == epoch] or [0.0])
        doublings = int(math.log2(max(1.0, min(found, most) / smallest)))
        sizes.append(max(sizes[-1], smallest * 2**doublings))
    ends = [end for end in range(1, epochs) if sizes[end + 1] != sizes[end]]
    return [(end, sizes[end]) for end in [*ends, epochs]]


def write_plan(run_dir: Path, batch: Batch, epochs: int) -> None:
    """If the batch asks for it, write a recipe with these stages next to the run's own, and log the stages."""
    if batch.plan is None:
        return
    found = records.read(run_dir / "metrics.jsonl").records
    noise = [(int(r["epoch"]), float(r["noise_scale"])) for r in found if r["event"] == "train" and r.get("noise_scale")]
    planned = stages(noise, epochs, batch.global_batch, batch.order.length)
    section: list[JsonObject] = []
    for end, size in planned:
        steps = batch.accumulation_steps * size // batch.global_batch
        split = {"batch.accumulation_steps": steps} if batch.accumulation_steps > 1 else {}
        section.append({**({"until": f"{end}ep"} if end < epochs else {}), "batch.global_batch": size, **split})
    recipe = re.sub(r"(?m)^(  plan: noise|hash: .*)\n", "", files.read_text(run_dir / "recipe.yaml"))
    files.write_text(run_dir / NAME, write.with_section(recipe, write.block({"stages": section})))
    told = ", ".join(f"{size:,} samples to epoch {end}" for end, size in planned)
    logger.info("batch.plan=noise: %s, by %d records: recipe=%s", told, len(noise), run_dir / NAME)

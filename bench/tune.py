"""`drivetrain tune` against a full grid: how near its choice comes to the grid's best, and its share of the grid's time.

    python -m bench.tune
    python -m bench.tune --grid bench/results/tune-cpu.json    # tune alone, against the grid as it was measured

The grid is every combination of GRID, in comparisons of BATCH arms at a time, each with the original run as the baseline.
Then the grid's best and tune's choice are compared with each other in new rounds, because the best of many noisy figures
is too high.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import before, machine, parse, table, write
from drivetrain.measure.benchmark import arms, comparison
from drivetrain.measure.benchmark.arms import ArmSpec
from drivetrain.measure.benchmark.interleave import never_stop
from drivetrain.measure.benchmark.row import Row
from drivetrain.measure.tune import tune

OVERRIDES = ["recipe=naive", "data=digits", "model=resnet9", "runtime.device=cpu"]
STEP = "step runtime.zero_grad=none optimizer.foreach=null"  # the naive recipe sets these two otherwise
GRID = {
    "precision": ["fp32", "bf16"],
    "surgery": ["[]", "[channels_last]"],
    "compile": ["none", "inductor", STEP],
    "optimizer.fused": ["false", "true"],
    "loader": ["sync", "threads", "workers"],
    "batch": ["fixed", "accumulate"],
}
BATCH = 16  # arms alive at once


def main() -> None:
    """Run both and write bench/results/tune-cpu.json."""
    given = parse(__doc__, "tune-cpu.json", rounds=8, block_s=0.3, budget_s=300.0, grid=Path, only=GRID)
    grid = before(given.grid) if given.grid else _grid(given.only, given.rounds, given.block_s)
    best, grid_s = grid["best"], grid["grid_s"]
    tuning, tune_s = _tuned(given.budget_s, given.block_s)
    specs = [arms.compose("the grid's best", [*OVERRIDES, *best.split()]), arms.compose("tune's choice", tuning.current())]
    ratio = comparison.measure(specs, comparison.Settings(rounds=24, block_s=0.5), OVERRIDES, never_stop).rows[1].ratio
    write(given.out, {
        **grid, "machine": machine(), "overrides": OVERRIDES, "tune_s": tune_s, "cost": tune_s / grid_s,
        "chosen": list(tuning.accepted.values()), "chosen_to_best": ratio,
    })  # fmt: skip
    table("tune against the grid", ("", "overrides", "seconds"), [
        ("grid's best", best, f"{grid_s:.0f}"), ("tune's choice", " ".join(tuning.accepted.values()), f"{tune_s:.0f}"),
    ])  # fmt: skip
    if ratio is not None:
        of_best = f"{ratio.middle:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        print(f"tune's choice: {of_best} of the grid's best, for {tune_s / grid_s:.1%} of its time")


def _cell(values: Sequence[str], keys: Sequence[str]) -> ArmSpec:
    overrides = " ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))
    return arms.compose(overrides, [*OVERRIDES, *overrides.split()])


def _grid(keys: Sequence[str], rounds: int, block_s: float) -> dict[str, Any]:
    """Every cell's ratio to the original run, the best cell's overrides, and the seconds of it all."""
    began = time.perf_counter()
    specs = [s for v in itertools.product(*(GRID[key] for key in keys)) if (s := _cell(v, keys)).job is not None]
    rows = [row for n in range(0, len(specs), BATCH) for row in _part(specs[n : n + BATCH], rounds, block_s)]
    best = max((row for row in rows if row.ratio is not None), key=lambda row: row.ratio.middle if row.ratio else 0.0)
    return {
        "grid": {key: GRID[key] for key in keys}, "cells": len(specs), "rounds": rounds, "best": best.label,
        "grid_machine": machine(), "grid_s": time.perf_counter() - began,
        "ratios": {row.label: row.ratio or row.error for row in rows},
    }  # fmt: skip


def _part(specs: Sequence[ArmSpec], rounds: int, block_s: float) -> list[Row]:
    """A part of the grid, with its ratios to the original run."""
    base = arms.compose("as it is", OVERRIDES)
    return comparison.measure([base, *specs], comparison.Settings(rounds=rounds, block_s=block_s), OVERRIDES, never_stop).rows[1:]


def _tuned(budget_s: float, block_s: float) -> tuple[tune.Tuning, float]:
    """The search and its proof, and their seconds; without the quality check and the range test, which a grid has not either."""
    began = time.perf_counter()
    tuning = tune.Tuning(tune.Settings(budget_s=budget_s, block_s=block_s, quality=False), OVERRIDES, ())
    for stage in tune.STAGES["all"]:
        tuning.run(stage)
    tuning.prove()
    return tuning, time.perf_counter() - began


if __name__ == "__main__":
    main()

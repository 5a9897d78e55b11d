"""`drivetrain tune` against a full grid: what its choice loses to the grid's best, and what it cost of the grid's time.

    python -m bench.tune --rounds 6

The grid is every combination of GRID, all arms in one comparison. Then the grid's best and tune's choice are compared by
themselves, over fresh rounds: the best of many noisy figures is not the figure to be measured against.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

from bench.harness import RESULTS, machine, table, write
from drivetrain.measure import compare, tune

WORDS = ["recipe=naive", "data=digits", "model=resnet9", "runtime.device=cpu"]
GRID = {
    "precision": ["fp32", "bf16"],
    "surgery": ["[]", "[channels_last]"],
    "compile": ["none", "inductor", "step"],
    "optimizer.fused": ["false", "true"],
    "loader": ["sync", "threads", "workers"],
    "batch": ["fixed", "accumulate"],
}


def main() -> None:
    """Run both and write bench/results/tune-cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of the grid")
    parser.add_argument("--turn-s", type=float, default=0.3)
    parser.add_argument("--budget-s", type=float, default=300.0, help="of tune")
    parser.add_argument("--only", nargs="*", default=list(GRID), choices=list(GRID), help="the grid's keys")
    parser.add_argument("--out", type=Path, default=RESULTS / "tune-cpu.json")
    given = parser.parse_args()
    tuning, tune_s = _tuned(given.budget_s, given.turn_s)
    began = time.perf_counter()
    cells = [dict(zip(given.only, values, strict=True)) for values in itertools.product(*(GRID[key] for key in given.only))]
    entries = [
        compare.entry(" ".join(f"{k}={v}" for k, v in c.items()), [*WORDS, *(f"{k}={v}" for k, v in c.items())]) for c in cells
    ]
    grid = compare.measure(entries, compare.Settings(rounds=given.rounds, turn_s=given.turn_s), WORDS)
    grid_s = time.perf_counter() - began
    best = max((row for row in grid.rows if row.samples_per_second), key=lambda row: row.samples_per_second or 0.0)
    arms = [compare.entry("the grid's best", best.words), compare.entry("tune's choice", tuning.now())]
    last = compare.measure(arms, compare.Settings(rounds=12, turn_s=0.5), WORDS)
    ratio = last.rows[1].ratio
    write(given.out, {
        "machine": machine(), "words": WORDS, "grid": {key: GRID[key] for key in given.only}, "cells": len(cells),
        "grid_s": grid_s, "tune_s": tune_s, "cost": tune_s / grid_s, "best": best.label,
        "chosen": list(tuning.taken.values()), "chosen_to_best": ratio,
        "rows": {row.label: row.samples_per_second or row.error for row in grid.rows},
    })  # fmt: skip
    table("tune against the grid", ("", "words", "seconds"), [
        ("grid's best", best.label, f"{grid_s:.0f}"), ("tune's choice", " ".join(tuning.taken.values()), f"{tune_s:.0f}"),
    ])  # fmt: skip
    if ratio is not None:
        of_best = f"{ratio.middle:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        print(f"tune's choice: {of_best} of the grid's best, for {tune_s / grid_s:.1%} of its time")


def _tuned(budget_s: float, turn_s: float) -> tuple[tune.Tuning, float]:
    """The search alone: proof, quality and range test are no part of what a grid does."""
    began = time.perf_counter()
    tuning = tune.Tuning(tune.Settings(budget_s=budget_s, turn_s=turn_s), WORDS, ())
    for stage in tune.STAGES["all"]:
        tuning.run(stage)
    return tuning, time.perf_counter() - began


if __name__ == "__main__":
    main()

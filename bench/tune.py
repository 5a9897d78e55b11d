"""`drivetrain tune` against a full grid: what its choice loses to the grid's best, and what it cost of the grid's time.

    python -m bench.tune
    python -m bench.tune --grid bench/results/tune-cpu.json    # tune alone, against the grid as it was measured

The grid is every combination of GRID that there is, in comparisons of BATCH arms at a time, each beside the run as it is.
Then the grid's best and tune's choice are compared by themselves, over fresh rounds: the best of many noisy figures is not
the figure to be measured against.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, machine, table, write
from drivetrain.measure.benchmark import compare
from drivetrain.measure.tune import tune

WORDS = ["recipe=naive", "data=digits", "model=resnet9", "runtime.device=cpu"]
STEP = "step runtime.zero_grad=none optimizer.foreach=null"  # which the naive recipe sets otherwise
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="of the grid; 8, as many as tune has")
    parser.add_argument("--turn-s", type=float, default=0.3)
    parser.add_argument("--budget-s", type=float, default=300.0, help="of tune")
    parser.add_argument("--grid", type=Path, help="a result of before, whose grid is taken as it was measured")
    parser.add_argument("--only", nargs="*", choices=list(GRID), help="the grid's keys")
    parser.add_argument("--out", type=Path, default=RESULTS / "tune-cpu.json")
    given = parser.parse_args()
    if given.grid and (given.only or given.rounds):
        parser.error("--grid is measured already: --only and --rounds are for a new one")
    grid = json.loads(given.grid.read_text()) if given.grid else _grid(given.only or list(GRID), given.rounds or 8, given.turn_s)
    best, grid_s = grid["best"], grid["grid_s"]
    tuning, tune_s = _tuned(given.budget_s, given.turn_s)
    arms = [compare.entry("the grid's best", [*WORDS, *best.split()]), compare.entry("tune's choice", tuning.now())]
    ratio = compare.measure(arms, compare.Settings(rounds=24, turn_s=0.5), WORDS, all_stay).rows[1].ratio
    write(given.out, {
        **grid, "machine": machine(), "words": WORDS, "tune_s": tune_s, "cost": tune_s / grid_s,
        "chosen": list(tuning.taken.values()), "chosen_to_best": ratio,
    })  # fmt: skip
    table("tune against the grid", ("", "words", "seconds"), [
        ("grid's best", best, f"{grid_s:.0f}"), ("tune's choice", " ".join(tuning.taken.values()), f"{tune_s:.0f}"),
    ])  # fmt: skip
    if ratio is not None:
        of_best = f"{ratio.middle:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        print(f"tune's choice: {of_best} of the grid's best, for {tune_s / grid_s:.1%} of its time")


def all_stay(*_: object) -> tuple[()]:
    """No arm is given up before the last round."""
    return ()


def _cell(values: Sequence[str], keys: Sequence[str]) -> compare.Entry:
    words = " ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))
    return compare.entry(words, [*WORDS, *words.split()])


def _grid(keys: Sequence[str], rounds: int, turn_s: float) -> dict[str, Any]:
    """Every cell's ratio to the run as it is, the best one's words, and what all of it took."""
    began = time.perf_counter()
    entries = [e for v in itertools.product(*(GRID[key] for key in keys)) if (e := _cell(v, keys)).job is not None]
    rows = [row for n in range(0, len(entries), BATCH) for row in _part(entries[n : n + BATCH], rounds, turn_s)]
    best = max((row for row in rows if row.ratio is not None), key=lambda row: row.ratio.middle if row.ratio else 0.0)
    return {
        "grid": {key: GRID[key] for key in keys}, "cells": len(entries), "rounds": rounds, "best": best.label,
        "grid_machine": machine(), "grid_s": time.perf_counter() - began,
        "ratios": {row.label: row.ratio or row.error for row in rows},
    }  # fmt: skip


def _part(entries: Sequence[compare.Entry], rounds: int, turn_s: float) -> list[compare.Row]:
    """A part of the grid, its ratios to the run as it is."""
    arms = [compare.entry("as it is", WORDS), *entries]
    return compare.measure(arms, compare.Settings(rounds=rounds, turn_s=turn_s), WORDS, all_stay).rows[1:]


def _tuned(budget_s: float, turn_s: float) -> tuple[tune.Tuning, float]:
    """The search and its proof; quality and range test are no part of what a grid does."""
    began = time.perf_counter()
    tuning = tune.Tuning(tune.Settings(budget_s=budget_s, turn_s=turn_s, quality=False), WORDS, ())
    for stage in tune.STAGES["all"]:
        tuning.run(stage)
    tuning.prove()
    return tuning, time.perf_counter() - began


if __name__ == "__main__":
    main()

"""Is `drivetrain compare` honest? Equal arms against each other, and planted slowdowns, many times over.

    python -m bench.honest --repeats 40
    python -m bench.honest --quality      verdicts on quality instead: the same again, planted breaks, harmless changes

Each repeat compares an arm with the same again, and with slowdowns of about 5 % and 3 %, in fresh processes for each round.
With --quality each repeat trains the arms with seeds of its own; --repeats are those of the same against itself, harmless
changes have half as many, breaks a quarter (bench.honest_quality, bench.breaks).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from bench import honest_quality
from bench.harness import RESULTS, machine, table, write
from drivetrain.measure.benchmark import arms, comparison
from drivetrain.measure.benchmark.interleave import Arm, run_rounds

OVERRIDES = [
    "data=digits", "model=own", "model.target=bench.planted.Slowed", "trust=[bench]", "runtime.device=cpu",
    "scheduler=constant", "optimizer=sgd",
]  # fmt: skip
SHARES = {"the same": 0.0, "5 % planted": 0.05, "3 % planted": 0.03}


def main() -> None:
    """Run the campaign and write bench/results/honest-cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--block-s", type=float, default=0.3)
    parser.add_argument("--quality", action="store_true", help="judge verdicts on quality")
    parser.add_argument("--processes", type=int, default=2, help="with --quality: repeats that run at a time")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.quality:
        repeats = {"same": given.repeats, "harmless": -(-given.repeats // 2), "break": -(-given.repeats // 4)}
        honest_quality.main(repeats, given.processes, given.out or RESULTS / "honest-quality-cpu.json")
        return
    step_ms = _step_ms()
    found: dict[str, list[Any]] = {name: [] for name in SHARES}
    for repeat in range(given.repeats):
        specs = [arms.compose("base", [*OVERRIDES, "model.kwargs.extra_ms=0.0"])]
        for name, share in SHARES.items():  # relative to the slowed arm's own step, so that its rate is 1 - share
            specs.append(arms.compose(name, [*OVERRIDES, f"model.kwargs.extra_ms={step_ms * share / (1 - share):.5f}"]))
        done = comparison.measure(specs, comparison.Settings(rounds=given.rounds, block_s=given.block_s), OVERRIDES)
        for row in done.rows[1:]:
            found[row.label].append(row.ratio)
            print(f"{repeat + 1:3d}/{given.repeats} {row.label:12s} {row.ratio}", flush=True)
    summaries = {name: _summary(ratios) for name, ratios in found.items()}
    write(
        given.out or RESULTS / "honest-cpu.json",
        {"machine": machine(), "rounds": given.rounds, "block_s": given.block_s, "step_ms": step_ms, "arms": summaries},
    )
    header = ("planted", "median ratio", "called different", "of", "median width")
    rows = [(n, f"{a['median']:.3f}", str(a["different"]), str(a["repeats"]), f"{a['width']:.3f}") for n, a in summaries.items()]
    table("compare, over fresh processes", header, rows)


def _summary(ratios: list[Any]) -> dict[str, Any]:
    return {
        "repeats": len(ratios), "different": sum(r.differs for r in ratios),
        "median": statistics.median(r.middle for r in ratios),
        "width": statistics.median(r.high - r.low for r in ratios), "ratios": [list(r) for r in ratios],
    }  # fmt: skip


def _step_ms() -> float:
    """Milliseconds of a step without a planted slowdown."""
    import tempfile

    import torch  # noqa: F401 - before the fork

    with tempfile.TemporaryDirectory() as folder:
        job = arms.compose("base", [*OVERRIDES, "model.kwargs.extra_ms=0.0"]).job
        assert job is not None
        arm = Arm("base", job, Path(folder) / "arm")
        run_rounds([arm], 6, 0.5)
        return 1e3 * statistics.median(s for block in arm.blocks for s in block.step_s)


if __name__ == "__main__":
    main()

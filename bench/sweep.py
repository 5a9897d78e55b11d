"""What a sweep costs beyond its jobs: `drivetrain train -m` beside a fresh process for each job.

`python -m bench.sweep [--quick] [--jobs N] [--out FILE]`

Tiny jobs of a few updates, which differ in their seed alone. In the order A B B A: a sweep of one job, a sweep of N, and N
processes one after another. A job's cost in a sweep is the difference of the two sweeps' wall times over N - 1 (so what
is paid once for a sweep, the import of torch, drops out); what it costs beyond the job itself is that, less the median
`wall_s` of the jobs' own result.json, which count from the moment when a job's process begins until its result is known.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import harness

TARGET_S = 0.25  # a job beyond the job itself
OVERRIDES = [
    "model=mlp", "data=synthetic", "data.shape=[32]", "batch.global_batch=64", "scheduler=constant", "updates=5",
    "runtime.device=cpu", "runtime.threads=1",
]  # fmt: skip


def train(*overrides: str) -> tuple[float, list[float]]:
    """Seconds of one command, and those that each of its jobs took by itself."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        command = [sys.executable, "-m", "src.train", "-q", *overrides, *OVERRIDES, f"output_dir={folder}"]
        done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, check=False)
        wall = time.perf_counter() - began
        results = [json.loads(file.read_text()) for file in Path(folder).rglob("result.json")]
    if done.returncode or not results or any(r["status"] != "completed" or r["updates"] != 5 for r in results):
        raise RuntimeError(f"the jobs did not train: {done.returncode} {done.stderr[-300:]}")
    return wall, [r["wall_s"] for r in results]


def sweep(jobs: int) -> tuple[float, list[float]]:
    """A sweep of so many jobs."""
    return train("-m", "runtime.seed=" + ",".join(map(str, range(jobs))))


def processes(jobs: int) -> float:
    """So many jobs, each in a fresh process."""
    return sum(train(f"runtime.seed={seed}")[0] for seed in range(jobs))


def measure(jobs: int, pairs: int) -> dict[str, Any]:
    """All figures, in seconds a job."""
    rows: list[dict[str, float]] = []
    for pair in range(pairs):
        separate = processes(jobs) if pair % 2 else 0.0
        one, _ = sweep(1)
        many, own = sweep(jobs)
        separate = separate or processes(jobs)
        job = (many - one) / (jobs - 1)
        rows.append({"sweep": many / jobs, "processes": separate / jobs, "job": job, "beyond": job - statistics.median(own)})
    spreads = {name: harness.spread([row[name] for row in rows]) for name in rows[0]}
    ratio = harness.against([row["processes"] for row in rows], [row["sweep"] for row in rows])["ratio"]
    met = spreads["beyond"]["median"] <= TARGET_S if pairs > 1 else None
    return {"jobs": jobs, "pairs": pairs, **spreads, "processes_to_sweep": ratio, "target_s": TARGET_S, "met": met, "rows": rows}


def show(figures: dict[str, Any]) -> None:
    """The figures as a table."""
    names = {
        "processes": "a fresh process for each job", "sweep": "a sweep, its start shared", "job": "each further job of a sweep",
        "beyond": "  of that, beyond the job itself",
    }  # fmt: skip
    rows = [
        [text, f"{figures[name]['median']:.3f}", f"{figures[name]['p10']:.3f} – {figures[name]['p90']:.3f}"]
        for name, text in names.items()
    ]
    harness.table(f"{figures['jobs']} jobs ({figures['pairs']} pairs)", ("", "s a job", "p10 – p90"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="bench.sweep", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one pair of two jobs: does it run?")
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "sweep-cpu.json")
    given = parser.parse_args(argv)
    jobs, pairs = (2, 1) if given.quick else (given.jobs, given.pairs)
    content = {"machine": harness.machine(), "unit": "s", **measure(jobs, pairs)}
    show(content)
    harness.write(given.out, content)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

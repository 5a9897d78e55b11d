"""What a sweep costs beyond its jobs: `drivetrain train -m` beside a fresh process for each job.

`python -m bench.sweep [--quick] [--jobs N] [--out FILE]`

Tiny jobs of a few updates, which differ in their seed alone. In the order A B B A: a sweep of one job, a sweep of N, and N
processes one after another. A job's cost in a sweep is the difference of the two sweeps' wall times over N - 1 (so what
is paid once for a sweep, the import of torch, drops out); what it costs beyond the job itself is that, less the median
`wall_s` of the jobs' own result.json, which count from the moment when a job's process begins until its result is known.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import harness

TARGET_S = 0.25  # a job beyond the job itself
OVERRIDES = [
    "model=mlp", "data=synthetic", "data.shape=[32]", "batch.global_batch=64", "scheduler=constant", "updates=5",
    "runtime.device=cpu", "runtime.threads=1",
]  # fmt: skip
SHOWN = {
    "processes": "a fresh process for each job", "sweep": "a sweep, its start shared", "job": "each further job of a sweep",
    "beyond": "  of that, beyond the job itself",
}  # fmt: skip


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


def measure(jobs: int, pairs: int) -> dict[str, Any]:
    """All figures, in seconds a job."""
    rows: list[dict[str, float]] = []
    for pair in range(pairs):
        found: dict[str, float] = {}
        for arm in ("processes", "sweep") if pair % 2 else ("sweep", "processes"):
            if arm == "processes":
                found[arm] = sum(train(f"runtime.seed={seed}")[0] for seed in range(jobs)) / jobs
                continue
            one, (many, own) = train("-m", "runtime.seed=0")[0], train("-m", f"runtime.seed={','.join(map(str, range(jobs)))}")
            job = (many - one) / (jobs - 1)
            found |= {"sweep": many / jobs, "job": job, "beyond": job - statistics.median(own)}
        rows.append(found)
    spreads = {name: harness.spread([row[name] for row in rows]) for name in SHOWN}
    ratio = harness.against([row["processes"] for row in rows], [row["sweep"] for row in rows])["ratio"]
    met = spreads["beyond"]["median"] <= TARGET_S if pairs > 1 else None
    return {"jobs": jobs, "pairs": pairs, **spreads, "processes_to_sweep": ratio, "target_s": TARGET_S, "met": met, "rows": rows}


def main() -> None:
    """Measure and report."""
    given = harness.parse(__doc__, "sweep-cpu.json", quick=False, jobs=10, pairs=7)
    found = measure(2, 1) if given.quick else measure(given.jobs, given.pairs)
    rows = [[text, *(f"{found[name][key]:.3f}" for key in ("median", "p10", "p90"))] for name, text in SHOWN.items()]
    harness.table(f"{found['jobs']} jobs ({found['pairs']} pairs)", ("", "s a job", "p10", "p90"), rows)
    harness.write(given.out, {"unit": "s", **found})


if __name__ == "__main__":
    main()

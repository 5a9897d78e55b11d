"""The cost of starts: until the first update of the default run, until a bad option is answered, and for each job of a sweep.

`python -m bench.startup [--quick] [--pairs N] [--jobs N] [--out FILE]`

Fresh processes alternate with ones that only import torch (A B B A), so that a drifting machine slows both. Wall seconds and
CPU seconds of the process and its children; the disk's cache is warm. `result.json` has what the run itself says of its first
update. A job of a sweep costs the difference of a sweep of N tiny jobs and one of a single job, over N - 1, so that what is paid
once for a sweep drops out; beyond the job itself it costs that, less the median `wall_s` of the jobs' own result.json.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from bench import harness

TORCH, RUN, JOB = "import torch", "the default run, one update", "each further job of a sweep"
OVERRIDES = ("saving=none", "runtime.device=cpu")
TINY = (
    "model=mlp", "data=synthetic", "data.shape=[32]", "batch.global_batch=64", "scheduler=constant", "updates=5",
    "runtime.threads=1",
)  # fmt: skip
BAD = {"precision=ampp": ("precision=ampp",), "optimizer.lr=-1": ("optimizer.lr=-1",)}
Figures = dict[str, float]
T = TypeVar("T")


def timed(run: Callable[[], T]) -> tuple[Figures, T]:
    """The seconds of what runs in processes of its own, and what it came to."""
    began, before = time.perf_counter(), os.times()
    found = run()
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": time.perf_counter() - began, "cpu": cpu}, found


def python(*words: str) -> tuple[Figures, subprocess.CompletedProcess[str]]:
    """Run an interpreter in the checkout."""
    return timed(lambda: subprocess.run([sys.executable, *words], cwd=harness.ROOT, capture_output=True, text=True, check=False))


def first_update() -> Figures:
    """Seconds of a run of one update, and until its first one has ended."""
    began = time.time()
    found, (_, (result,)) = timed(lambda: harness.train("updates=1", *OVERRIDES))
    return {**found, "ready": result["ended"] - result["wall_s"] + result["time_to_first_step_s"] - began}


def refusal(words: Sequence[str]) -> Figures:
    """Seconds until a bad option is answered."""
    found, done = python("-m", "src.train", "-q", "updates=1", *OVERRIDES, *words)
    if done.returncode != 2 or "error:" not in done.stderr:
        raise RuntimeError(f"{' '.join(words)} was not refused: {done.returncode} {done.stderr[-200:]}")
    return found


def further_job(jobs: int) -> Figures:
    """Seconds of a job of a sweep, and of that those beyond the job itself."""
    (one, _), (many, (_, results)) = (
        timed(partial(harness.train, "-m", f"runtime.seed=range({count})", *TINY, *OVERRIDES)) for count in (1, jobs)
    )
    job = {key: (many[key] - one[key]) / (jobs - 1) for key in many}
    return {**job, "beyond": job["wall"] - statistics.median(result["wall_s"] for result in results)}


def measure(pairs: int, jobs: int) -> dict[str, Any]:
    """All figures, in seconds, and the difference to importing torch: of a run until its first update has ended."""
    variants: dict[str, Callable[[], Figures]] = {
        TORCH: lambda: python("-c", "import torch")[0], RUN: first_update,
        **{name: partial(refusal, words) for name, words in BAD.items()}, JOB: partial(further_job, jobs),
    }  # fmt: skip
    runs: dict[str, list[Figures]] = {name: [] for name in variants}
    for pair in range(pairs):
        for name in variants if pair % 2 == 0 else reversed(variants):
            runs[name].append(variants[name]())
    base = [run["wall"] for run in runs[TORCH]]
    return {
        name: {
            **{key: harness.spread([run[key] for run in of]) for key in of[0]},
            "blocks": of,
            # A further job is a difference of times, which noise may make negative: it has no ratio.
            "to_import_torch": harness.interval([run.get("ready", run["wall"]) - b for run, b in zip(of, base, strict=True)]),
        }
        for name, of in runs.items()
    }


def main() -> None:
    """Measure and report."""
    given = harness.parse(__doc__, "startup-cpu.json", quick=False, pairs=9, jobs=10)
    if not given.quick:
        first_update()  # the disk's cache is warm from here on
    found = measure(1, 2) if given.quick else measure(given.pairs, given.jobs)
    rows = [
        [name, *(f"{f[key]['median']:.3f}" for key in ("wall", "cpu")), f"{f['to_import_torch']['median']:+.3f}"]
        for name, f in found.items()
    ]
    harness.table("start", ("", "s", "CPU s", "to import torch, s"), rows)
    print(f"beyond the job itself a sweep's job takes {found[JOB]['beyond']['median']:.3f} s")
    harness.write(given.out, {"unit": "s", "pairs": given.pairs, "jobs": given.jobs, "starts": found})


if __name__ == "__main__":
    main()

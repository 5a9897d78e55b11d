"""How long the program takes to start: to the first update of the default run, and to the answer to a bad option.

`python -m bench.startup [--quick] [--pairs N] [--out FILE]`

Fresh processes alternate with ones that only import torch (A B B A), so that a drifting machine slows both. Wall seconds and
CPU seconds of the process and its children; the disk's cache is warm. `result.json` has what the run itself says of its first
update.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import harness

TRAIN = ("-m", "src.train", "-q")
OVERRIDES = ("updates=1", "saving=none", "runtime.device=cpu")
BAD = {"precision=ampp": ("precision=ampp",), "optimizer.lr=-1": ("optimizer.lr=-1",)}
Figures = dict[str, float]


def python(*words: str) -> tuple[Figures, subprocess.CompletedProcess[str]]:
    """Run an interpreter in the checkout: its seconds, and the finished process."""
    began, before = time.perf_counter(), os.times()
    done = subprocess.run([sys.executable, *words], cwd=harness.ROOT, capture_output=True, text=True, check=False)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": time.perf_counter() - began, "cpu": cpu}, done


def import_torch() -> Figures:
    """Seconds of a process that only imports torch."""
    return python("-c", "import torch")[0]


def first_update() -> Figures:
    """Seconds of a run of one update, and until its first one has ended."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        found, done = python(*TRAIN, *OVERRIDES, f"output_dir={folder}")
        files = list(Path(folder).rglob("result.json"))
        result = {"ended": files[0].stat().st_mtime, **json.loads(files[0].read_text())} if files else {"status": done.stderr}
    if result["status"] != "completed" or result["updates"] != 1:
        raise RuntimeError(f"the run did not train: {result['status']}")
    return {**found, "ready": result["ended"] - result["wall_s"] + result["time_to_first_step_s"] - began}


def refusal(words: Sequence[str]) -> Figures:
    """Seconds until a bad option is answered."""
    found, done = python(*TRAIN, *OVERRIDES, *words)
    if done.returncode != 2 or "error:" not in done.stderr:
        raise RuntimeError(f"{' '.join(words)} was not refused: {done.returncode} {done.stderr[-200:]}")
    return found


def measure(pairs: int) -> dict[str, Any]:
    """All figures, in seconds, and the difference to importing torch: of a run until its first update has ended."""
    runs: dict[str, list[Figures]] = {name: [] for name in ("import torch", "the default run, one update", *BAD)}
    for pair in range(pairs):
        arms = [("import torch", import_torch), ("the default run, one update", first_update)]
        for name, run in arms if pair % 2 == 0 else reversed(arms):
            runs[name].append(run())
        for name, words in BAD.items():
            runs[name].append(refusal(words))
    base = [run["wall"] for run in runs["import torch"]]
    return {
        name: {
            **{key: harness.spread([run[key] for run in of]) for key in of[0]},
            "to_import_torch": harness.against([run.get("ready", run["wall"]) for run in of], base)["difference"],
        }
        for name, of in runs.items()
    }


def main() -> None:
    """Measure and report."""
    given = harness.parse(__doc__, "startup-cpu.json", quick=False, pairs=9)
    if not given.quick:
        first_update()  # the disk's cache is warm from here on
    found = measure(1 if given.quick else given.pairs)
    rows = [
        [name, *(f"{f[key]['median']:.3f}" for key in ("wall", "cpu")), f"{f['to_import_torch']['median']:+.3f}"]
        for name, f in found.items()
    ]
    harness.table("start", ("", "s", "CPU s", "to import torch, s"), rows)
    harness.write(given.out, {"unit": "s", "pairs": given.pairs, "starts": found})


if __name__ == "__main__":
    main()

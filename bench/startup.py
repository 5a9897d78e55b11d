"""What a start costs: from the process's start to the first update, and to the answer to a bad option.

`python -m bench.startup [--quick] [--out FILE]`

Against `python -c "import torch"`, in the order A B B A, each a fresh process. Times are the wall's, from before the process
is started. The first update's moment is read from outside: result.json is written when the run has lasted its `wall_s`,
so its file time, less `wall_s`, plus `time_to_first_step_s`, is when the first update ended (to a few milliseconds).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import harness

TRAIN = ["-m", "src.train"]
OVERRIDES = [
    "model=mlp", "data=synthetic", "data.shape=[32]", "batch.global_batch=64", "scheduler=constant", "saving=none",
    "updates=1", "runtime.device=cpu", "runtime.threads=1",
]  # fmt: skip
BAD = {"precision=ampp": ["precision=ampp"], "optimizer.lr=-1": ["optimizer.lr=-1"]}
IMPORT_TORCH = "import torch, time; print(time.time())"


def python(*overrides: str) -> tuple[float, float, subprocess.CompletedProcess[str]]:
    """Run an interpreter in the checkout: its start time, its seconds, and the finished process."""
    began = time.time()
    done = subprocess.run([sys.executable, *overrides], cwd=harness.ROOT, capture_output=True, text=True, check=False)
    return began, time.time() - began, done


def import_torch() -> dict[str, float]:
    """Seconds until torch is imported, and until the process has ended."""
    began, wall, done = python("-c", IMPORT_TORCH)
    return {"ready": float(done.stdout.split()[-1]) - began, "wall": wall}


def first_update() -> dict[str, float]:
    """Seconds until the first update has ended, as seen from outside and as the run itself says, and until the end."""
    with tempfile.TemporaryDirectory() as folder:
        began, wall, done = python(*TRAIN, *OVERRIDES, f"output_dir={folder}")
        files = list(Path(folder).rglob("result.json"))
        result = json.loads(files[0].read_text()) if files else {"status": done.stderr}
        if result["status"] != "completed" or result["updates"] != 1:
            raise RuntimeError(f"the run did not train: {result['status']}")
        imported = files[0].stat().st_mtime - result["wall_s"]  # when drivetrain was
    own = result["time_to_first_step_s"]
    return {"ready": imported + own - began, "time_to_first_step_s": own, "wall": wall}


def refusal(overrides: Sequence[str]) -> dict[str, float]:
    """Seconds until a bad option is answered."""
    _, wall, done = python(*TRAIN, *OVERRIDES, *overrides)
    if done.returncode != 2 or "error:" not in done.stderr:
        raise RuntimeError(f"{' '.join(overrides)} was not refused: {done.returncode} {done.stderr[-200:]}")
    return {"wall": wall}


def imports() -> dict[str, Any]:
    """What a run imports beyond `import torch`: own milliseconds by package (torch's by subpackage), the ten largest."""
    with tempfile.TemporaryDirectory() as folder:
        ours, torch_alone = _import_times(*TRAIN, *OVERRIDES, f"output_dir={folder}"), _import_times("-c", "import torch")
    extra = {name: ms for name, ms in ours.items() if name not in torch_alone}
    packages: dict[str, float] = defaultdict(float)
    for name, ms in extra.items():
        packages[".".join(name.split(".")[: 2 if name.startswith("torch.") else 1])] += ms
    return {"modules": len(extra), "ms": sum(extra.values()), "packages_ms": _largest(packages), "modules_ms": _largest(extra)}


def _largest(values: dict[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1])[:10])


def _import_times(*overrides: str) -> dict[str, float]:
    """Each imported module's own milliseconds, by `-X importtime` (which slows all of them)."""
    output = python("-X", "importtime", *overrides)[2].stderr
    return {m[2]: int(m[1]) / 1e3 for m in re.finditer(r"^import time:\s*(\d+) \|\s*\d+ \|\s*(\S+)$", output, re.M)}


def measure(pairs: int, warmup: bool) -> dict[str, Any]:
    """All figures, in seconds."""
    if warmup:
        first_update()  # the disk's cache is warm from here on
    torch_runs: list[dict[str, float]] = []
    our_runs: list[dict[str, float]] = []
    bad_runs: dict[str, list[dict[str, float]]] = {name: [] for name in BAD}
    for pair in range(pairs):
        arms = [lambda: torch_runs.append(import_torch()), lambda: our_runs.append(first_update())]
        for run in arms if pair % 2 == 0 else reversed(arms):
            run()
        for name, overrides in BAD.items():
            bad_runs[name].append(refusal(overrides))
    ready, base = ([run["ready"] for run in runs] for runs in (our_runs, torch_runs))
    return {
        "pairs": pairs,
        "import_torch": _spreads(torch_runs),
        "first_update": {**_spreads(our_runs), "to_import_torch": harness.against(ready, base)},
        "bad_option": {name: _spreads(runs) for name, runs in bad_runs.items()},
        "imports_beyond_torch": imports(),
        "runs": {"import_torch": torch_runs, "first_update": our_runs, "bad_option": bad_runs},
    }


def _spreads(runs: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {key: harness.spread([run[key] for run in runs]) for key in runs[0]}


def show(figures: dict[str, Any]) -> None:
    """The figures as tables."""

    def row(name: str, spread: dict[str, float], against: str = "") -> list[str]:
        return [name, f"{spread['median']:.3f}", f"{spread['p10']:.3f} – {spread['p90']:.3f}", against]

    first, torch_only = figures["first_update"], figures["import_torch"]
    difference = first["to_import_torch"]["difference"]
    rows = [
        row("import torch", torch_only["ready"]),
        row(
            "process start to first update", first["ready"],
            f"{difference['median']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]",
        ),
        row("  as result.json says (from drivetrain's import)", first["time_to_first_step_s"]),
        row("  the whole run of one update", first["wall"]),
        *(row(f"answer to {name}", spreads["wall"]) for name, spreads in figures["bad_option"].items()),
    ]  # fmt: skip
    harness.table(f"start ({figures['pairs']} pairs)", ("", "s", "p10 – p90", "to import torch, s [95 %]"), rows)
    beyond = figures["imports_beyond_torch"]
    title = f"imported beyond torch: {beyond['modules']} modules, {beyond['ms']:.0f} ms as -X importtime sees them"
    harness.table(title, ("package", "own ms"), [[name, f"{ms:.1f}"] for name, ms in beyond["packages_ms"].items()])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="bench.startup", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one pair: does it run?")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "startup-cpu.json")
    given = parser.parse_args(argv)
    content = {"machine": harness.machine(), "unit": "s", **measure(1 if given.quick else given.pairs, warmup=not given.quick)}
    show(content)
    harness.write(given.out, content)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Do stages shorten the time to an accuracy? `python -m bench.stages` trains digits with and without them.

Every seed trains all arms, one after the other in an order that turns with the seed, in this process, with one thread. An arm
has reached the target at the first evaluation on the validation set that gives the target, at the image size that the run
ends with: an evaluation of small images does not count. The time is this process's CPU seconds from the start of training
to that evaluation, with all evaluations before it and with the building of later stages; beside it are updates and the wall's
seconds. A run that does not reach the target counts as not reached; ratios are of the seeds where both arms reached it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness import before, parse, table, write
from drivetrain.core.callback import Callback, Event
from drivetrain.core.signals import StopFlag
from drivetrain.core.world import World
from drivetrain.launch.job import prepare
from drivetrain.launch.worker import run_rank
from drivetrain.measure import intervals

TARGET = 0.98
COMMON = (
    "data=digits", "data.size=16", "model=resnet9", "log_every=1000", "saving=none", "logger=[]", "runtime.device=cpu",
    "runtime.threads=1",
)  # fmt: skip
BASE = "size 16 all along"
EARLY = "[features.0.*,features.1.*,features.3.*]"  # the layers that work on the largest images
ARMS = {
    BASE: (),
    "size 8 until 0.3": ("stages=[{until: 0.3, data.size: 8}]",),
    "size 12 until 0.4": ("stages=[{until: 0.4, data.size: 12}]",),
    "early layers frozen from 0.2": (f"stages=[{{until: 0.2}}, {{model.freeze: {EARLY}}}]",),
}


@dataclass(frozen=True)
class Reached:
    """What a run needed for the target; None where it did not reach it."""

    cpu_s: float | None
    wall_s: float | None
    updates: int | None
    whole_cpu_s: float  # of the whole run
    best: float  # accuracy on the validation set, at the run's own image size


class Watch(Callback):
    """Notes CPU and wall seconds, updates and accuracy at each evaluation of images of the run's own size."""

    def __init__(self, from_update: float) -> None:
        self.seen: list[tuple[float, float, int, float]] = []
        self._from = from_update

    def start(self, event: Event) -> None:
        self._began = time.process_time(), time.perf_counter()

    def evaluation(self, event: Event) -> None:
        if event.update > self._from:
            cpu, wall = time.process_time() - self._began[0], time.perf_counter() - self._began[1]
            self.seen.append((cpu, wall, event.update, float(event.metrics["accuracy"])))

    def reached(self) -> Reached:
        """When the target was reached."""
        first = next((seen for seen in self.seen if seen[3] >= TARGET), None)
        cpu, wall, update = (None, None, None) if first is None else first[:3]
        return Reached(cpu, wall, update, self.seen[-1][0], max(seen[3] for seen in self.seen))


def trained(words: Sequence[str], seed: int, epochs: int) -> Reached:
    """Train one arm with one seed."""
    from drivetrain.core import horizon, stages

    job = prepare([*COMMON, *words, f"epochs={epochs}", f"runtime.seed={seed}"])
    run, own_size = job.run, job.run.data.size
    over = horizon.run_horizon(run)
    assert over is not None
    ends = stages.boundaries(run, over)
    small = [
        stages.in_updates(end, over) for end, stage in zip(ends, run.stages, strict=False) if stage.run.data.size != own_size
    ]
    watch = Watch(max(small, default=0))
    job.attach = lambda trainer: trainer.callbacks.named.update(watch=watch)
    with tempfile.TemporaryDirectory() as folder, StopFlag() as stop:
        result, _ = run_rank(job, World(), Path(folder), stop, quiet=True)
    if result.status != "completed":
        raise RuntimeError(result.error)
    return watch.reached()


def against(runs: Sequence[Reached], base: Sequence[Reached]) -> dict[str, Any]:
    """The ratio of the base's CPU seconds and updates to the arm's, over the seeds where both reached the target."""
    found: dict[str, Any] = {}
    for name in ("cpu_s", "updates", "wall_s"):
        pairs = [(getattr(r, name), getattr(b, name)) for r, b in zip(runs, base, strict=False) if r.cpu_s and b.cpu_s]
        if pairs:
            ratio = intervals.ratio([b for _, b in pairs], [r for r, _ in pairs])
            found[name] = {"ratio": ratio.middle, "low": ratio.low, "high": min(ratio.high, 1e9), "seeds": len(pairs)}
    return found


def main() -> None:
    """Train, print the table and write the file. A call with more seeds trains only what the file does not have."""
    given = parse(__doc__, "stages-cpu.json", seeds=10, epochs=10, arms=ARMS)
    earlier = before(given.out).get("arms", {})
    runs = {name: [Reached(**run) for run in earlier.get(name, {}).get("runs", [])] for name in ARMS}
    trained((), 0, 1)  # what the process does once: imports, kernels
    for seed in range(given.seeds):
        turn = seed % len(given.arms)
        for name in given.arms[turn:] + given.arms[:turn]:
            if seed == len(runs[name]):
                runs[name].append(trained(ARMS[name], seed, given.epochs))
                print(seed, name, runs[name][-1], flush=True)
        write(given.out, summary(runs, given.epochs))
    show(runs)


def summary(runs: dict[str, list[Reached]], epochs: int) -> dict[str, Any]:
    """What the file holds."""
    arms = {
        name: {
            "overrides": list(ARMS[name]),
            "reached": sum(r.cpu_s is not None for r in of_arm),
            "seeds": len(of_arm),
            "faster": against(of_arm, runs[BASE]) if name != BASE else {},
            "runs": [asdict(r) for r in of_arm],
        }
        for name, of_arm in runs.items()
    }
    about = {"target": f"accuracy>={TARGET} on the validation set", "epochs": epochs, "overrides": list(COMMON)}
    return {**about, "arms": arms}


def show(runs: dict[str, list[Reached]]) -> None:
    """Print the table."""
    rows = []
    for name, of_arm in runs.items():
        times = [r.cpu_s for r in of_arm if r.cpu_s is not None]
        faster = against(of_arm, runs[BASE]).get("cpu_s") if name != BASE else None
        rows.append(
            (
                name,
                f"{len(times)} of {len(of_arm)}",
                f"{statistics.median(times):.1f} s" if times else "–",
                f"{faster['ratio']:.2f}× [{faster['low']:.2f}, {faster['high']:.2f}]" if faster else "1",
                f"{statistics.median(r.best for r in of_arm):.4f}",
            )
        )
    table(f"to accuracy {TARGET}", ("", "reached", "CPU, median", "faster", "best, median"), rows)


if __name__ == "__main__":
    main()

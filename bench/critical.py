"""Does the noise scale predict the updates of a batch? `python -m bench.critical` trains digits and text with eight batches each.

McCandlish et al. (2018) predict updates(B) = U (1 + C / B) to a target, with the critical batch C. C is measured here by the look
of batch=critical, U (updates of an endlessly large batch) by the runs themselves: the least squares of the logarithms. Each
batch trains with every seed until the target is reached, at a constant learning rate that grows with the square root of the
batch. The validation set is evaluated whenever the updates have grown by a twentieth, so that small batches and large ones are
measured equally finely. The seconds are this process's CPU seconds from the start of training to the evaluation that reached
the target, without the evaluations. A run that does not reach the target counts as not reached, and its batch gets no median
where that is so of half of the seeds.
"""

from __future__ import annotations

import math
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import before, parse, table, write
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.signals import StopFlag
from drivetrain.core.target import Reach
from drivetrain.core.world import World
from drivetrain.launch.job import prepare
from drivetrain.launch.worker import run_rank

# `smallest` is the batch of the look.
TASKS: dict[str, dict[str, Any]] = {
    "digits, a residual network": {
        "words": (
            "data=digits", "model=resnet9", "model.width=8", "optimizer=adamw", "optimizer.lr=0.003", "epochs=40",
        ),
        "target": "accuracy>=0.97",
        "smallest": 32,
        "batches": (16, 32, 64, 128, 256, 384, 575, 1150),
    },
    "digits, an MLP": {
        "words": (
            "data=digits", "model=mlp", "model.hidden=[512]", "optimizer=adamw", "optimizer.lr=0.002", "epochs=100",
        ),
        "target": "accuracy>=0.97",
        "smallest": 32,
        "batches": (4, 8, 16, 32, 64, 128, 256, 575),
    },
    "standard library, a transformer": {
        "words": (
            "data=stdlib", "data.length=128", "data.test_samples=100", "model=gpt", "model.width=64", "model.depth=2",
            "model.heads=2", "loss=next_token", "optimizer=adamw", "optimizer.lr=0.003", "epochs=3",
        ),
        "target": "bits_per_byte<=2.8",
        "smallest": 8,
        "batches": (4, 8, 16, 32, 64, 128, 256, 512),
    },
}  # fmt: skip
COMMON = (
    "scheduler=constant", "batch.lr_scaling=sqrt", "batch.base_batch=64", "evaluate_every=1000000", "log_every=1000",
    "saving=none", "logger=[]", "runtime.device=cpu", "runtime.threads=1",
)  # fmt: skip
FINER = 1.05  # the updates of an evaluation over those of the one before


class Watch:
    """Evaluates a run whenever its updates have grown by a twentieth, and stops it where it has reached the target."""

    def __init__(self, trainer: Any, target: Reach, stop: StopFlag) -> None:
        self._trainer, self._target, self._stop = trainer, target, stop
        self._next, self.updates, self.samples, self.cpu_s = 1, 0, 0, 0.0

    def stream(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Pass the micro-batches on; each is one update."""
        resumed = time.process_time()
        for batch in stream:
            if self.updates == self._next and not self._stop.raised:
                self.cpu_s += time.process_time() - resumed
                self._evaluate()
                resumed = time.process_time()
            yield batch
            if not self._stop.raised:
                self.updates += 1
                self.samples += len(batch.y)

    def _evaluate(self) -> None:
        self._next = max(self.updates + 1, math.ceil(self.updates * FINER))
        if self._target.reached(self._trainer.evaluator.evaluate()[self._target.metric]):
            self._stop.raised = signal.SIGTERM


def trained(task: Mapping[str, Any], batch: int, seed: int) -> dict[str, Any]:
    """Train with a batch and a seed: the updates, samples and CPU seconds to the target; None where it was not reached."""
    job = prepare([*COMMON, *task["words"], f"batch.global_batch={batch}", f"runtime.seed={seed}"])
    target = Reach.parse(task["target"])
    assert target is not None
    with tempfile.TemporaryDirectory() as folder, StopFlag() as stop:
        watches: list[Watch] = []

        def attach(trainer: Any) -> None:
            watches.append(Watch(trainer, target, stop))
            trainer.stream_watchers.append(watches[0].stream)

        job.attach, job.told = attach, True
        result, _ = run_rank(job, World(), Path(folder), stop, quiet=True)
    if result.status not in ("completed", "interrupted"):
        raise RuntimeError(result.error)
    watch, reached = watches[0], result.status == "interrupted"
    found = {"updates": watch.updates, "samples": watch.samples, "cpu_s": watch.cpu_s}
    return {key: value if reached else None for key, value in found.items()} | {"whole_cpu_s": watch.cpu_s}


def looked(task: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """What batch=critical finds with a seed: the noise scale and the batch."""
    from drivetrain.launch.trials import Trials

    limits = (f"batch.global_batch={task['smallest']}", f"batch.max={task['batches'][-1]}")
    job = prepare([*COMMON, *task["words"], "batch=critical", *limits, f"runtime.seed={seed}"])
    found: dict[str, Any] = job.run.batch.choose(Trials(job)).found
    return found


def median(runs: Sequence[dict[str, Any]], figure: str) -> float | None:
    """The median over the seeds, those that did not reach the target above all others; None where the middle one did not."""
    values = sorted(math.inf if run[figure] is None else run[figure] for run in runs)
    middle = statistics.median(values) if values else math.inf
    return middle if math.isfinite(middle) else None


def predicted(medians: dict[int, float | None], critical: float) -> dict[int, float]:
    """The updates of each batch for this critical batch; the one free factor fits the medians by least squares of logarithms."""
    shape = {batch: 1 + critical / batch for batch in medians}
    logs = [math.log(updates / shape[batch]) for batch, updates in medians.items() if updates]
    least = math.exp(statistics.fmean(logs)) if logs else math.nan
    return {batch: least * factor for batch, factor in shape.items()}


def error(medians: dict[int, float | None], critical: float) -> float:
    """The root mean square of the logarithm of measured over predicted updates."""
    line = predicted(medians, critical)
    return math.sqrt(statistics.fmean(math.log(u / line[b]) ** 2 for b, u in medians.items() if u))


def fitted(medians: dict[int, float | None]) -> float:
    """The critical batch that fits the measured updates best."""
    return min((2 ** (n / 8) for n in range(8, 100)), key=lambda critical: error(medians, critical))


def judged(runs: dict[int, list[dict[str, Any]]], looks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the runs and the looks of a task tell together."""
    updates = {batch: median(of_batch, "updates") for batch, of_batch in runs.items()}
    seconds = {batch: median(of_batch, "cpu_s") for batch, of_batch in runs.items()}
    scales = [look["noise_scale"] for look in looks if look["noise_scale"]]
    critical = statistics.median(scales)
    chosen = int(statistics.median_low(look["global_batch"] for look in looks))
    best, at_best = min((s, b) for b, s in seconds.items() if s is not None)
    at_chosen = seconds.get(chosen)
    line = predicted(updates, critical)
    return {
        "noise_scale": critical,
        "noise_scale_by_seed": [look["noise_scale"] for look in looks],
        "chosen_by_seed": [look["global_batch"] for look in looks],
        "chosen": chosen,
        "fitted_critical_batch": fitted(updates),
        "error_of_prediction": math.exp(error(updates, critical)),  # a factor, the typical one
        "error_of_best_fit": math.exp(error(updates, fitted(updates))),
        "best_batch_in_time": at_best,
        "chosen_over_best_in_time": None if at_chosen is None else at_chosen / best,
        "batches": [
            {
                "batch": batch,
                "updates": updates[batch],
                "predicted_updates": round(line[batch], 1),
                "cpu_s": seconds[batch],
                "reached": sum(run["updates"] is not None for run in of_batch),
                "seeds": len(of_batch),
                "runs": of_batch,
            }
            for batch, of_batch in runs.items()
        ],
    }


def main() -> None:
    """Train, print the tables and write the file. A call with more seeds trains only what the file does not have."""
    given = parse(__doc__, "critical-cpu.json", seeds=5, tasks=TASKS)
    found: dict[str, Any] = before(given.out).get("tasks", {})
    for name in given.tasks:
        task, earlier = TASKS[name], {row["batch"]: list(row["runs"]) for row in found.get(name, {}).get("batches", [])}
        runs = {batch: earlier.get(batch, []) for batch in task["batches"]}
        looks = [looked(task, seed) for seed in range(given.seeds)]
        for seed in range(given.seeds):
            for batch, of_batch in runs.items():
                if seed == len(of_batch):
                    of_batch.append(trained(task, batch, seed))
                    print(name, batch, seed, of_batch[-1], flush=True)
            found[name] = {"overrides": [*COMMON, *task["words"]], **judged(runs, looks)}
            write(given.out, {"tasks": found})
        show(name, found[name])


def show(name: str, found: dict[str, Any]) -> None:
    """Print the table of a task."""
    rows = [
        (
            f"{row['batch']}{' (chosen)' if row['batch'] == found['chosen'] else ''}",
            f"{row['reached']} of {row['seeds']}",
            "–" if row["updates"] is None else f"{row['updates']:.0f}",
            f"{row['predicted_updates']:.0f}",
            "–" if row["cpu_s"] is None else f"{row['cpu_s']:.2f} s",
        )
        for row in found["batches"]
    ]
    table(name, ("batch", "reached", "updates", "predicted", "CPU"), rows)
    print(
        f"noise scale {found['noise_scale']:.0f}, best fit {found['fitted_critical_batch']:.0f}; predictions are off by a "
        f"factor {found['error_of_prediction']:.2f}; the chosen one takes {found['chosen_over_best_in_time']} × the best's time"
    )


if __name__ == "__main__":
    main()

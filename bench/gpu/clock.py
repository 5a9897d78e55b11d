"""True rates: a run's words on its speed against the wall time of a device that has been waited for.

Beside the run's own loggers one more is called at each record. It waits until the device has done all its work and reads
the clock. So the time between two of its records is that of the updates between them, however far ahead of the device the
host ran.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import harness
from bench.gpu import campaign
from bench.gpu.campaign import Row

WITHIN = 0.03
REASON = (
    "a run's rate is by the wall time of training, with its records and epochs' ends in it; both clocks are read at slightly "
    "different moments, under 3 % of the 0.1 s and more between two records"
)
SKIP = 3  # first records: they compile and warm up
COMMON = (
    "data=synthetic", "data.test_samples=8", "optimizer=sgd", "scheduler=constant", "saving=none",
    "epochs=1000000", "evaluate_every=1000000",
)  # fmt: skip
MLP = (
    "model=mlp",
    "model.hidden=[256,256,256,256,256,256]",
    "data.shape=[3,8,8]",
    "data.samples=38400",
    "batch.global_batch=64",
    "log_every=600",
)
CONVS = (
    "model=timm",
    "model.name=resnet50",
    "data.shape=[3,128,128]",
    "data.samples=2560",
    "batch.global_batch=64",
    "log_every=20",
)
FED = ("data=digits", "model=resnet9", "model.width=8", "batch.global_batch=64", "log_every=100")
SMALL = {
    MLP: ("model=mlp", "model.hidden=[64]", "data.shape=[3,8,8]", "data.samples=2560", "batch.global_batch=64", "log_every=20"),
    CONVS: ("model=resnet9", "model.width=4", "data.shape=[3,8,8]", "data.samples=2560", "batch.global_batch=16", "log_every=4"),
    FED: ("data=digits", "model=resnet9", "model.width=4", "batch.global_batch=16", "log_every=4"),
}
RUNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "launch-bound eager": (MLP, ()),
    "launch-bound inductor": (MLP, ("compile=inductor",)),
    "launch-bound whole step": (MLP, ("compile=step",)),
    "launch-bound CUDA graph": (MLP, ("compile=cudagraph",)),
    "launch-bound accumulated": (MLP, ("batch=accumulate", "batch.accumulation_steps=4")),
    "launch-bound ddp of one rank": (MLP, ("parallel=ddp", "parallel.nproc=1")),
    "device-bound eager": (CONVS, ()),
    "device-bound bf16": (CONVS, ("precision=bf16", "surgery=[channels_last]")),
    "device-bound amp": (CONVS, ("precision=amp",)),
    "device-bound whole step": (CONVS, ("compile=step", "precision=bf16")),
    "fed by threads": (FED, ("loader=threads",)),
    "fed by the device loader": (FED, ("loader=device",)),
    "resident": (FED, ("loader=resident",)),
}
CPU_ROWS = ("launch-bound eager", "launch-bound accumulated", "device-bound bf16", "fed by threads")


def rows(device: str, folder: Path) -> list[Row]:
    """All runs."""
    found = []
    for name, (base, words) in RUNS.items():
        small = [*SMALL[base], *words, "runtime.threads=1"]
        given = campaign.distinct([*COMMON, *([*base, *words] if device == "cuda" else small), f"runtime.device={device}"])
        if "data=synthetic" not in given:  # such as digits, whose shape is its own
            given = [word for word in given if not word.startswith("data.")]
        records = 9 if device == "cuda" else 8
        found.append(Row(name, timed, (given, folder, records), 150.0, alone=True))
    return found


def timed(words: Sequence[str], folder: Path, records: int) -> dict[str, Any]:
    """Both rates of a run, over the same updates."""
    last = {word.partition("=")[0]: word for word in words}
    updates = records * int(last["log_every"].partition("=")[2])
    given = [*words, f"updates={updates}", f"output_dir={folder}/runs"]
    file, steps = folder / "outside.txt", folder / "steps.txt"
    file.write_text("")  # a rank may be another process than this one
    outside = harness.Sink(lambda record: _note(file, record))

    def attach(trainer: Any) -> None:
        trainer.log.writers.append(outside)
        trainer.log.writers.append(harness.Sink(lambda _: steps.write_text(json.dumps(list(trainer.timer.steps)))))

    result = campaign.train(given, attach=attach)
    seen = [tuple(map(float, line.split())) for line in file.read_text().splitlines()]
    every = int(last["log_every"].partition("=")[2])
    return {**campaign.facts(result), **rates(seen, result.step_ms_p50), **slow(json.loads(steps.read_text()), every)}


def slow(steps: Sequence[float], every: int) -> dict[str, Any]:
    """Every step's time, and those of the counted ones that took more than twice the median, by what they come after."""
    counted = steps[SKIP * every :]
    median = statistics.median(counted)
    more = {"first after a record": 0.0, "others": 0.0}
    for number, seconds in enumerate(counted):
        if seconds > 2 * median:
            more["others" if number % every else "first after a record"] += 1e3 * (seconds - median)
    return {
        "median_ms": 1e3 * median, "mean_ms": 1e3 * statistics.fmean(counted), "slow_steps_cost_ms": more,
        "steps_us": [round(1e6 * seconds) for seconds in steps],
    }  # fmt: skip


def rates(seen: Sequence[tuple[float, ...]], step_ms_p50: float | None) -> dict[str, Any]:
    """Samples a second, reported and by the clock outside, from (seconds, updates, samples, reported rate) of each record."""
    counted = list(pairwise(seen[SKIP - 1 :]))
    seconds, updates, samples = (counted[-1][1][i] - counted[0][0][i] for i in range(3))
    reported_s = sum((after[2] - before[2]) / after[3] for before, after in counted)
    ratio = seconds / reported_s  # of the rates, reported to outside
    return {
        "reported_samples_per_s": samples / reported_s, "outside_samples_per_s": samples / seconds,
        "reported_over_outside": ratio,
        "outside_step_ms": 1e3 * seconds / updates, "reported_step_ms_p50": step_ms_p50,
        "within": abs(ratio - 1) <= WITHIN, "tolerance": {"ratio": WITHIN, "reason": REASON},
    }  # fmt: skip


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The runs that report another rate than the true one."""
    ratios = {name: round(row["reported_over_outside"], 4) for name, row in rows.items() if row["status"] == "ok"}
    return {"reported_over_outside": ratios, "wrong": [name for name in ratios if not rows[name]["within"]]}


def _note(file: Path, record: dict[str, Any]) -> None:
    if record["samples_per_second"]:
        harness.synchronize()
        with file.open("a") as opened:
            print(time.perf_counter(), record["update"], record["samples"], record["samples_per_second"], file=opened)

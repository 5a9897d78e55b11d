"""The same run in several ways, and the losses of its updates compared: is it right?

A run and its reference see the same samples in the same order from the same weights. So their losses differ by rounding
alone, which training then amplifies from update to update. Each family has its tolerances with their reason:
`first` for the first loss (one forward on equal weights), `early` for the greatest difference of the first EARLY updates,
`late` for the mean of the last LATE. All are relative.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import harness
from bench.gpu import campaign
from bench.gpu.campaign import Row

EARLY, LATE = 5, 10  # updates
BASE = (
    "data=digits", "model=resnet9", "model.width=16", "optimizer=sgd", "optimizer.lr=0.02", "scheduler=constant",
    "batch.global_batch=128", "log_every=1", "updates=40", "epochs=100", "evaluate_every=100", "saving=none",
    "runtime.cudnn_benchmark=false",
)  # fmt: skip
# Deterministic kernels, and a network that has no others: torch may refuse the backward of max-pooling on CUDA.
EXACTLY = ("model=mlp", "model.hidden=[64,64]", "runtime.deterministic=true", "optimizer=adamw", "saving=last")


@dataclass(frozen=True)
class Tolerance:
    """The greatest relative differences that rounding explains, and why."""

    first: float
    early: float
    late: float
    reason: str


@dataclass(frozen=True)
class Family:
    """Runs that should come to the same losses as the first of them."""

    runs: dict[str, tuple[str, ...]]
    tolerance: Tolerance


FUSED = Tolerance(
    1e-4, 1e-2, 0.05, "float32 in another order: a fused kernel sums in another order than eager ones, 2^-24 each; BatchNorm "
    "over small maps and SGD amplify it about tenfold in an update",
)  # fmt: skip
SAME = Tolerance(
    1e-5, 1e-3, 0.02, "the same float32 arithmetic on the same samples; where the device normalises them instead of the CPU, an "
    "input may differ in its last bit, as may sums of atomic additions",
)  # fmt: skip
FORMATS = {
    "tf32": Tolerance(2e-3, 0.05, 0.1, "factors of products have 11 significant bits: 2^-11 each, averaged over many terms"),
    "bf16": Tolerance(2e-2, 0.1, 0.15, "factors and results of products have 8 significant bits: 2^-8 each, over nine layers"),
    "amp": Tolerance(2e-3, 0.05, 0.1, "float16 has 11 significant bits: 2^-11 each; its small gradients are scaled"),
}
EXACT = Tolerance(0.0, 0.0, 0.0, "a resumed run repeats the whole one to the last bit, with deterministic kernels")
FAMILIES = {
    "compile": Family({name: (f"compile={name}",) for name in ("none", "inductor", "step", "cudagraph")}, FUSED),
    "accumulation": Family(
        {name: (f"compile={name}", "batch=accumulate", "batch.accumulation_steps=4") for name in ("none", "step", "cudagraph")},
        FUSED,
    ),
    "loader": Family({name: (f"loader={name}",) for name in ("sync", "threads", "device", "resident")}, SAME),
    **{
        f"precision {name}": Family({"fp32": ("precision=fp32",), name: (f"precision={name}",)}, t) for name, t in FORMATS.items()
    },
}
CPU_ROWS = ("compile=none", "loader=sync", "loader=threads", "loader=device", "precision=fp32", "precision=bf16", "interrupted")
SMALL = ("model.width=4", "batch.global_batch=16", "updates=12", "runtime.threads=1")  # of the CPU's form


def rows(device: str, folder: Path) -> list[Row]:
    """Every run of every family once, and the interrupted one."""
    words = dict.fromkeys(run for family in FAMILIES.values() for run in family.runs.values())
    common = [*BASE, *(() if device == "cuda" else SMALL), f"runtime.device={device}", f"output_dir={folder}/runs"]
    found = [Row(" ".join(run), curve, ([*common, *run],), 180.0) for run in words]
    exactly = [word for word in (*common, *EXACTLY) if not word.startswith("model.width")]
    return [*found, Row("interrupted", interrupted, (exactly,), 180.0)]


def curve(words: Sequence[str]) -> dict[str, Any]:
    """The losses of a run."""
    result = campaign.train(campaign.distinct(words))
    return {**campaign.facts(result), "losses": campaign.losses(result.run_dir)}


def interrupted(words: Sequence[str]) -> dict[str, Any]:
    """A run that a signal ends half-way and a resume takes to its end, and the same run as a whole."""
    words = campaign.distinct(words)
    whole = campaign.losses(campaign.train(words).run_dir)
    stopped = campaign.train(words, attach=_stop_half_way, ends="interrupted")
    again = campaign.train([f"resume={stopped.run_dir}"])
    compared = compare(campaign.losses(again.run_dir), whole, EXACT)
    if not compared["within"] or stopped.updates >= again.updates:
        raise campaign.RunFailed(f"stopped at {stopped.updates}: the resumed run differs from the whole one: {compared}")
    return {"stopped_at": stopped.updates, "of": again.updates, **compared}


def compare(losses: Sequence[float], reference: Sequence[float], tolerance: Tolerance) -> dict[str, Any]:
    """The three differences, and whether they are within the tolerance."""
    relative = [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]
    late, late_reference = sum(losses[-LATE:]), sum(reference[-LATE:])
    found = {"first": relative[0], "early": max(relative[:EARLY]), "late": abs(late - late_reference) / late_reference}
    within = all(difference <= getattr(tolerance, name) for name, difference in found.items())
    return {"difference": found, "tolerance": vars(tolerance), "within": within}


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each family's runs against its first; what is not there yet is left out."""
    found: dict[str, Any] = {}
    for name, family in FAMILIES.items():
        first, *others = (" ".join(run) for run in family.runs.values())
        for other in others:
            runs = [rows.get(other, {}), rows.get(first, {})]
            if all("losses" in run for run in runs):
                found[f"{name}: {other} against {first}"] = compare(runs[0]["losses"], runs[1]["losses"], family.tolerance)
    return {"compared": found, "wrong": [name for name, compared in found.items() if not compared["within"]]}


def _stop_half_way(trainer: Any) -> None:
    def stop(record: dict[str, Any]) -> None:
        if record["update"] == trainer.max_updates // 2:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.log.writers.append(harness.Sink(stop))

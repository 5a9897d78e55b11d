"""Runs that are certified within the test's own process: quick, and a fault can be put into the trainer that is recorded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from drivetrain.config import validate as check
from drivetrain.core.context import BuildContext
from drivetrain.core.world import World
from drivetrain.launch import launcher

UPDATES = 4
SMALL = [
    "data=synthetic", "data.shape=[3,8,8]", "data.classes=4", "data.samples=48", "data.test_samples=20", "saving=none",
    "optimizer=sgd", "optimizer.lr=0.05", "batch.global_batch=12", "log_every=1", "epochs=2", "runtime.threads=1",
]  # fmt: skip
Break = Callable[[Any], None]


def traced(words: Sequence[str], broken: Break | None = None, **look: Any) -> Any:
    """The trace of a run; `broken` puts a fault into its trainer."""
    from drivetrain.engine import build
    from drivetrain.measure.certify import record, shadow

    job = launcher.prepare(list(words))
    check.validate_device(job.run)
    run = shadow.shadow_of(job.run) if look.get("float64") else job.run
    context = BuildContext(run, World(), Path(tempfile.mkdtemp(dir=Path.cwd())))
    try:
        trainer = build.build(context, [])
        if broken is not None:
            broken(trainer)
        return record.record(trainer, record.Look(UPDATES, **look))
    finally:
        context.on_exit.close()


@lru_cache(maxsize=64)
def reference(words: tuple[str, ...]) -> Any:
    """The trace of the run that others are compared with."""
    return traced(words)


@lru_cache(maxsize=64)
def floors(words: tuple[str, ...], roundoff: float) -> Any:
    """What rounding changes in it, as `drivetrain certify` measures it."""
    from drivetrain.measure.certify.certify import PERMUTED, ROUNDED
    from drivetrain.measure.certify.judge import Floors

    rounded = [traced(words, float64=True, roundoff=roundoff, seed=seed) for seed in range(ROUNDED)]
    return Floors([traced(words, permute=seed + 1) for seed in range(PERMUTED)], traced(words, float64=True), rounded)


def certified(words: Sequence[str], against: Sequence[str], broken: Break | None = None) -> Any:
    """The verdict on a run against another one, with the lines that tell it."""
    from drivetrain.measure.certify import explain
    from drivetrain.measure.certify.certify import Certified, refuse_random_layers, roundoff_of
    from drivetrain.measure.certify.judge import Floors, judge, same_bits
    from drivetrain.measure.certify.trace import FLOAT32

    run, other = launcher.prepare(list(words)).run, launcher.prepare(list(against)).run
    roundoff = max(roundoff_of(run), roundoff_of(other))
    ours, theirs = traced(words, broken), reference(tuple(against))
    same = same_bits(ours, theirs)
    if not same:
        refuse_random_layers(run, ours, theirs)
    found = judge(ours, theirs, Floors() if same else floors(tuple(against), roundoff), coarser=roundoff > FLOAT32)
    done = Certified(found, ours, theirs, roundoff)
    return done, explain.lines(found, ours, theirs, roundoff)

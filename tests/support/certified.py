"""Runs that are certified within the test's own process: quick, and a fault can be put into the trainer that is recorded."""

import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from drivetrain.config import validate as check
from drivetrain.core.world import World
from drivetrain.engine.context import RunContext
from drivetrain.launch import launcher

UPDATES = 4
SMALL = [
    "data=synthetic", "data.shape=[3,8,8]", "data.classes=4", "data.samples=48", "data.test_samples=20", "saving=none",
    "optimizer=sgd", "optimizer.lr=0.05", "batch.global_batch=12", "log_every=1", "epochs=2", "runtime.threads=1",
]  # fmt: skip
MLP = [*SMALL, "model=mlp", "model.hidden=[16,16]", "scheduler=linear"]
CONV = [*SMALL, "model=resnet9", "model.width=4", "scheduler=constant"]
GPT = [
    "data=stdlib", "data.max_files=10", "data.length=32", "data.test_samples=8", "loss=next_token", "model=gpt", "model.width=16",
    "model.heads=2", "model.depth=2", "batch.global_batch=8", "saving=none", "scheduler=constant", "runtime.threads=1",
    "updates=20", "optimizer=sgd", "optimizer.lr=0.1",
]  # fmt: skip
Break = Callable[[Any], None]


def traced(words: Sequence[str], broken: Break | None = None, **look: Any) -> Any:
    """The trace of a run; `broken` puts a fault into its trainer."""
    from drivetrain.engine import build
    from drivetrain.measure.certify import record

    job = launcher.prepare(list(words))
    check.validate_device(job.run)
    run, options = record.prepared(job.run, UPDATES, **look)
    context = RunContext(run, World(), Path(tempfile.mkdtemp(dir=Path.cwd())))
    try:
        trainer = build.build(context, [])
        if broken is not None:
            broken(trainer)
        return record.TracingStep(trainer, options).run()
    finally:
        context.on_exit.close()


@lru_cache(maxsize=256)
def recorded(words: tuple[str, ...], **look: Any) -> Any:
    """A trace that several tests need."""
    return traced(words, **look)


def certified(words: Sequence[str], against: Sequence[str], broken: Break | None = None) -> Any:
    """The verdict on a run against another one, with the lines that tell it."""
    from drivetrain.measure.certify.certify import certify, lines

    runs = (launcher.prepare(list(each)).run for each in (words, against))
    done = certify(*runs, partial(traced, words, broken), partial(recorded, tuple(against)), lambda line: None)
    return done, lines(done)

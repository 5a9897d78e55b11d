"""Trains variants to their ends with paired seeds, each run in a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from drivetrain.core import accelerators, process
from drivetrain.core.errors import Interrupted
from drivetrain.core.overrides import format_value
from drivetrain.core.target import Reach
from drivetrain.launch.job import Job
from drivetrain.measure.benchmark.arms import ArmSpec
from drivetrain.run import directory
from drivetrain.run.reader import RunFiles, read
from drivetrain.run.result import Result
from drivetrain.sweeps import SignalForwarder, SweepJob, run_one


class Train(Protocol):
    """Trains a variant with a seed, and returns what the run has left, which is gone from the disk."""

    def __call__(self, spec: ArmSpec, seed: int, alone: bool = False) -> RunFiles:
        """`alone`: in a new interpreter, whose memory is that of the run; a forked process shares this one's."""


@contextmanager
def trainings(
    verb: str, first: Job, reach: Reach | None = None, progress: Callable[..., None] = lambda *_: None
) -> Iterator[Train]:
    """Yield what trains variants, in a folder below the output_dir of `first` that is removed at the end.

    `reach` is a target for all of them. What a variant advises is told with its first seed alone. A signal is forwarded to the
    run and raises Interrupted; a variant that cannot be composed raises UserError.
    """
    accelerators.find()  # this, and the import of torch, once here, because the runs are forked
    folder = directory.create(Path(first.run.values["output_dir"]), verb, "training")
    told: set[str] = set()
    try:
        with SignalForwarder() as signals:

            def train(spec: ArmSpec, seed: int, alone: bool = False) -> RunFiles:
                progress(f"training {spec.label or 'the first variant'}: seed {seed}")
                place = folder / "run"
                words = [f"runtime.seed={seed}", f"output_dir={format_value(str(folder))}"]
                job = spec.again([*words, *([f"target={format_value(str(reach))}"] if reach is not None else [])])
                job.told = spec.label in told
                if alone:
                    result = _run_alone(job, place, signals)
                else:
                    told.add(spec.label)
                    _, result = run_one(SweepJob(spec.label, job.composed.overrides, job, []), place, signals, quiet=True)
                if signals.raised:
                    raise Interrupted("stopped by a signal while variants were trained")
                found = replace(read(place), result=result, status=result.status)
                directory.remove(place)
                return found

            yield train
    finally:
        directory.remove(folder)


class _Forwarded:
    """A process that signals are forwarded to."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.signal = child.send_signal


def _run_alone(job: Job, folder: Path, signals: SignalForwarder) -> Result:
    """Train in a new interpreter. Its standard input stays open for as long as this process lives, and it ends with it."""
    folders = [word for each in job.composed.config_dirs for word in ("--config-dir", str(each))]
    words = ["train", "--quiet", *folders, *job.composed.overrides, f"hydra.run.dir={format_value(str(folder))}"]
    env, pipe = {**os.environ, "PYTHONPATH": process.import_path()}, subprocess.PIPE
    command = [*process.command("drivetrain.cli.child"), *words]
    with subprocess.Popen(
        command, env=env, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True, encoding="utf-8"
    ) as child:
        signals.launcher = _Forwarded(child)  # type: ignore[assignment]
        if signals.raised:
            child.send_signal(signals.raised)
        assert child.stderr is not None
        said = child.stderr.read()  # `communicate` would close the input, which ends the child
        child.wait()
    signals.launcher = None
    errors = [line.removeprefix("error: ") for line in said.splitlines() if line.startswith("error: ")]
    return Result.read(folder) or Result(error="; ".join(errors) or f"its process ended with code {child.returncode}")

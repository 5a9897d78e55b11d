"""Trains a recipe to its end with several seeds, to measure again what it claims."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drivetrain.core import accelerators, process
from drivetrain.core.errors import Interrupted, UserError
from drivetrain.core.overrides import format_value
from drivetrain.core.target import Reach
from drivetrain.launch.job import Job
from drivetrain.measure.benchmark import arms, quality
from drivetrain.measure.benchmark.arms import ArmSpec
from drivetrain.measure.benchmark.facts import Facts
from drivetrain.measure.claims.kinds import Differences, OfRuns
from drivetrain.recipe.claim import Claim
from drivetrain.run import directory, reader
from drivetrain.run.reader import RunFiles
from drivetrain.run.result import Result
from drivetrain.sweeps import SignalForwarder
from drivetrain.ui.progress import Steps


def train(spec: ArmSpec, claim: Claim, count: int, asked: Sequence[OfRuns], seed: int | None = None) -> list[Facts]:
    """Train with so many seeds from `seed` on; None: with seeds that the claim did not have.

    The first training is the only one where it fails, or shows that nothing of what is asked can be told here. Raises UserError
    where the run cannot be built.
    """
    job = arms.baseline_job([spec])
    accelerators.find()  # this, and the import of torch, once here, because the runs are forked
    reach = Reach.parse(claim.target.reach) if claim.target is not None else None
    first = max(claim.seeds or (job.run.runtime.seed,)) + 1 if seed is None else seed
    on_cpu = job.run.runtime.device_type() == "cpu"
    folder, runs, told = directory.create(Path(job.run.values["output_dir"]), "verify"), list[Facts](), False
    try:
        with Steps() as steps, SignalForwarder() as signals:
            for number, each in enumerate(range(first, first + count)):
                steps(f"training {number + 1} of {count}: seed {each}")
                by_itself = on_cpu and claim.memory is not None and not number
                where = folder / str(number)
                if by_itself:
                    files = _run_by_itself(spec, job, each, where, signals)
                else:
                    files, told = quality.run_seed(spec, job, each, where, signals, told=told), True
                found = Facts.of(files, each, reach)
                if signals.raised:
                    raise Interrupted("stopped by a signal while the recipe was trained")
                runs.append(found)
                here = differences(claim, runs[0], job)
                if found.error is not None or all(kind.cannot_tell(here) for kind in asked):
                    break
    finally:
        directory.remove(folder)
    return runs


def differences(claim: Claim, run: Facts, job: Job) -> Differences:
    """Where the machine and the data of a run are not the claim's. Raises UserError for a run that could not be built."""
    here = Differences.of(claim, run.kind or job.run.runtime.device_type(), run.device, run.data)
    if run.kind is None and run.error is not None and not here.kind:
        raise UserError(run.error.removeprefix("failed: "))
    return here


class _Child:
    """A process that signals are forwarded to."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def signal(self, number: int) -> None:
        self._child.send_signal(number)


def _run_by_itself(spec: ArmSpec, job: Job, seed: int, folder: Path, signals: SignalForwarder) -> RunFiles:
    """Train in a new interpreter, whose memory is that of the run alone; the run's files, which lie in `folder`.

    Its standard input stays open for as long as this process lives, and it ends with it.
    """
    folders = [word for each in job.composed.config_dirs for word in ("--config-dir", str(each))]
    words = [*quality.seeded(spec, seed, folder), f"hydra.run.dir={format_value(str(folder))}"]
    env = {**os.environ, "PYTHONPATH": process.import_path()}
    command, pipe = [*process.command("drivetrain.cli.child"), "train", "--quiet", *folders, *words], subprocess.PIPE
    with subprocess.Popen(
        command, env=env, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True, encoding="utf-8"
    ) as child:
        signals.launcher = _Child(child)  # type: ignore[assignment]
        if signals.raised:
            child.send_signal(signals.raised)
        assert child.stderr is not None
        told = child.stderr.read()  # `communicate` would close the input, which ends the child
        child.wait()
    signals.launcher = None
    errors = [line.removeprefix("error: ") for line in told.splitlines() if line.startswith("error: ")]
    result = Result.read(folder) or Result(error="; ".join(errors) or f"its process ended with code {child.returncode}")
    return replace(reader.read(folder), result=result, status=result.status)

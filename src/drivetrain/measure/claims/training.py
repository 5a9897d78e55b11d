"""Trains a recipe to its end with several seeds, to measure again what it claims."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.core.errors import UserError
from drivetrain.core.target import Reach
from drivetrain.launch.job import Job
from drivetrain.measure.benchmark import arms
from drivetrain.measure.benchmark.arms import ArmSpec
from drivetrain.measure.benchmark.facts import Facts
from drivetrain.measure.claims.kinds import Differences, OfRuns
from drivetrain.measure.training import trainings
from drivetrain.recipe.claim import Claim
from drivetrain.ui.progress import Steps


def train(spec: ArmSpec, claim: Claim, count: int, asked: Sequence[OfRuns], seed: int | None = None) -> list[Facts]:
    """Train with so many seeds from `seed` on; None: with seeds that the claim did not have.

    The first training is the only one where it fails, or shows that nothing of what is asked can be told here. Raises UserError
    where the run cannot be built.
    """
    job = arms.baseline_job([spec])
    reach = Reach.parse(claim.target.reach) if claim.target is not None else None
    first = max(claim.seeds or (job.run.runtime.seed,)) + 1 if seed is None else seed
    memory = claim.memory is not None and job.run.runtime.device_type() == "cpu"
    runs: list[Facts] = []
    with Steps() as progress, trainings("verify", job, progress=progress) as run:
        for each in range(first, first + count):
            runs.append(Facts.of(run(spec, each, alone=memory and not runs), each, reach))
            here = differences(claim, runs[0], job)
            if runs[-1].error is not None or all(kind.cannot_tell(here) for kind in asked):
                break
    return runs


def differences(claim: Claim, run: Facts, job: Job) -> Differences:
    """Where the machine and the data of a run are not the claim's. Raises UserError for a run that could not be built."""
    here = Differences.of(claim, run.kind or job.run.runtime.device_type(), run.device, run.data)
    if run.kind is None and run.error is not None and not here.kind:
        raise UserError(run.error.removeprefix("failed: "))
    return here

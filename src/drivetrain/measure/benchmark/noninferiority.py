"""Whether a technique leaves the result as good as before: a non-inferiority test against the first arm.

All arms are trained with the same seeds, and two figures are compared, seed by seed: the final metric, and the mean
training loss over the run. The margin is twice the first arm's standard deviation over the seeds, or 0.5 % of its mean
where that is more. PASS: for both figures the 90 % interval of the difference (Student's t, 5 % on each side) lies below
the margin. FAIL: for one figure it lies above the margin, or a run did not complete that the first arm completed.
INCONCLUSIVE: anything else, so too few seeds never give a PASS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from drivetrain.core.errors import Interrupted, UserError
from drivetrain.core.selection import selected
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure.benchmark.arms import ArmSpec, baseline_job
from drivetrain.measure.intervals import Interval, deviation, mean
from drivetrain.run import directory
from drivetrain.run.reader import RunFiles, read
from drivetrain.sweep import SignalForwarder, SweepJob, run_one

MARGIN_DEVIATIONS = 2.0  # the margin in standard deviations of the first arm over its seeds
MARGIN_FLOOR = 0.005  # the least margin, as a share of the first arm's mean
CONFIDENCE = 0.9

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"


@dataclass
class TrainedRun:
    """One arm trained with one seed."""

    seed: int
    samples: int
    metric: float | None = None
    loss: float | None = None  # mean training loss over the run
    error: str | None = None


@dataclass
class Verdict:
    """The outcome and its evidence. A degradation says how much worse than the first arm, in the figure's own unit."""

    outcome: str
    reason: str
    metric: str
    runs: list[TrainedRun] = field(default_factory=list)
    degradation: dict[str, Interval] = field(default_factory=dict)  # by figure
    margin: dict[str, float] = field(default_factory=dict)  # by figure


def judge(specs: Sequence[ArmSpec], seeds: int, root: Path, progress: Callable[..., None]) -> list[Verdict | None]:
    """Train every arm that can run with the same seeds; return each arm's verdict, None for an arm that cannot run."""
    folder = directory.create(root, "compare", "quality")
    try:
        with SignalForwarder() as signals:
            runs = [
                _train(spec, spec.job, seeds, folder / str(n), signals, progress) if spec.job is not None else []
                for n, spec in enumerate(specs)
            ]
    finally:
        directory.remove(folder)
    selection = selected(baseline_job(specs).run)
    sign = -1.0 if selection.maximize else 1.0
    return [verdict(own, runs[0], selection.name, sign) if own else None for own in runs]


def verdict(runs: list[TrainedRun], base: list[TrainedRun], metric: str, sign: float) -> Verdict:
    """The verdict on an arm's `runs` against those of the first arm; `sign` is 1 where a lower metric is better, else -1."""
    if failed := next((run for run in base if run.error), None):
        return Verdict(INCONCLUSIVE, f"the first arm's own run with seed {failed.seed} ended: {failed.error}", metric, runs)
    if failed := next((run for run in runs if run.error), None):
        return Verdict(FAIL, f"the run with seed {failed.seed} ended: {failed.error}", metric, runs)
    if len(base) < 2:
        return Verdict(INCONCLUSIVE, "one seed shows no spread: set seeds=5", metric, runs)
    found = Verdict(PASS, "", metric, runs)
    reasons: list[str] = []
    for name, attribute, direction in ((metric, "metric", sign), ("training loss", "loss", 1.0)):
        before, after = [getattr(run, attribute) for run in base], [getattr(run, attribute) for run in runs]
        degradation = mean([direction * (a - b) for a, b in zip(after, before, strict=True)], CONFIDENCE)
        margin = max(MARGIN_DEVIATIONS * deviation(before), MARGIN_FLOOR * abs(sum(before) / len(before)))
        found.degradation[name], found.margin[name] = degradation, margin
        middle, low, high = degradation
        reason = f"{name} worse by {middle:.2g} ({low:.2g} to {high:.2g}), allowed {margin:.2g}"
        if low > margin:
            found.outcome = FAIL
            reasons.insert(0, reason)
        else:
            if not high <= margin and found.outcome == PASS:  # `not <=`: also where a figure is nan
                found.outcome = INCONCLUSIVE
            reasons.append(reason)
    found.reason = reasons[0] if found.outcome == FAIL else "; ".join(reasons)
    if {run.samples for run in runs} != {run.samples for run in base}:
        found.reason += f"; trained on {runs[0].samples:,} samples, the first arm on {base[0].samples:,}"
    return found


def _train(
    spec: ArmSpec, first: Job, seeds: int, folder: Path, signals: SignalForwarder, progress: Callable[..., None]
) -> list[TrainedRun]:
    """Train the arm to its end once for each seed, starting at the seed of its own job."""
    runs = []
    for number in range(seeds):
        if signals.raised:
            raise Interrupted("stopped by a signal while the arms were trained")
        progress(f"quality of {spec.label or 'the first arm'}: seed {number + 1} of {seeds}")
        seed = first.run.runtime.seed + number
        overrides = [*spec.overrides, f"runtime.seed={seed}", f"output_dir={folder}"]
        try:
            job = prepare_job(overrides, first.composed.config_dirs, first.composed.recipe)
        except UserError as error:
            raise UserError([f"{spec.label}: {problem}" for problem in error.problems]) from None
        _, result = run_one(SweepJob(spec.label, overrides, job, []), folder / str(number), signals, quiet=True)
        run = replace(read(folder / str(number)), result=result, status=result.status)
        runs.append(trained_run(run, seed, selected(job.run).name))
    return runs


def trained_run(run: RunFiles, seed: int, metric: str) -> TrainedRun:
    """The figures of a run's files that are judged; `metric` is the metric's name."""
    samples = run.train.samples[-1] if run.train.samples else 0
    if run.result is None or run.status != "completed":
        error = (run.result.error if run.result else "") or "no error message"
        return TrainedRun(seed, samples, error=f"{run.status}: {error.splitlines()[0]}")
    # Each recorded loss is the mean over the samples since the record before.
    points = zip(run.train.samples, [0, *run.train.samples], run.train.curve("loss"), strict=False)
    losses = [(now - before, loss) for now, before, loss in points if loss is not None]
    total = sum(count for count, _ in losses)
    mean_loss = sum(count * loss for count, loss in losses) / total if total else math.nan
    return TrainedRun(seed, samples, run.result.judged("final").get(metric), mean_loss)

"""Whether a technique leaves the result right: non-inferiority to the first arm, against its own spread over seeds.

For each of two figures, the final metric and the mean training loss over the run, the arms are trained with the same
seeds and their differences taken seed by seed. The margin is twice the first arm's standard deviation over the seeds,
or 0.5 % of its mean where that is more. PASS: the difference's 90 % interval (Student; each side 5 %) lies below the
margin, for both figures. FAIL: it lies beyond the margin for one of them, or a run did not complete that the first
arm's did. INCONCLUSIVE: anything else, so never PASS for want of seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drivetrain.core.errors import Interrupted, UserError
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure.intervals import Interval, deviation, mean
from drivetrain.run import directory
from drivetrain.run.reader import RunFiles, read
from drivetrain.sweep import Forward, SweepJob, run_one

SPREADS = 2.0  # of the first arm, that an arm may be worse by
FLOOR = 0.005  # of the first arm's mean: less than this is nobody's worry
CONFIDENCE = 0.9

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"


@dataclass
class Trained:
    """One arm trained with one seed."""

    seed: int
    samples: int
    metric: float | None = None
    loss: float | None = None  # mean training loss over the run
    error: str | None = None


@dataclass
class Verdict:
    """The word, and what it rests on. Differences are how much worse than the first arm, in the figure's own unit."""

    word: str
    reason: str
    name: str  # of the metric
    runs: list[Trained] = field(default_factory=list)
    worse: dict[str, Interval] = field(default_factory=dict)
    margin: dict[str, float] = field(default_factory=dict)


def judge(rows: Sequence[Any], entries: Sequence[Any], seeds: int, root: Path, say: Callable[..., None]) -> None:
    """Train every arm that can run with the same seeds, and set each row's verdict."""
    folder = directory.create(root, "compare", "quality")
    try:
        with Forward() as stop:
            runs = [_train(e, seeds, folder / str(n), stop, say) if e.job is not None else [] for n, e in enumerate(entries)]
    finally:
        directory.remove(folder)
    first = entries[0]
    name, better = first.job.run.loss.best
    sign = -1.0 if better(0.0, 1.0) == 1.0 else 1.0
    for row, mine in zip(rows, runs, strict=True):
        if mine:
            row.verdict = verdict(mine, runs[0], name, sign)


def verdict(runs: list[Trained], base: list[Trained], name: str, sign: float) -> Verdict:
    """`sign` is 1 where a lower metric is better, else -1."""
    if failed := next((r for r in base if r.error), None):
        return Verdict(INCONCLUSIVE, f"the first arm's own run with seed {failed.seed} ended: {failed.error}", name, runs)
    if failed := next((r for r in runs if r.error), None):
        return Verdict(FAIL, f"the run with seed {failed.seed} ended: {failed.error}", name, runs)
    found = Verdict(PASS, "", name, runs)
    reasons: list[str] = []
    for figure, toward in (("metric", sign), ("loss", 1.0)):
        before, after = [getattr(r, figure) for r in base], [getattr(r, figure) for r in runs]
        called = name if figure == "metric" else "training loss"
        if len(before) < 2:
            return Verdict(INCONCLUSIVE, "one seed shows no spread: set seeds=5", name, runs)
        worse = mean([toward * (a - b) for a, b in zip(after, before, strict=True)], CONFIDENCE)
        margin = max(SPREADS * deviation(before), FLOOR * abs(sum(before) / len(before)))
        found.worse[called], found.margin[called] = worse, margin
        span = f"{called} worse by {worse.middle:.2g} ({worse.low:.2g} to {worse.high:.2g}), allowed {margin:.2g}"
        if worse.low > margin:
            found.word = FAIL
            reasons.insert(0, span)
        else:
            if not worse.high <= margin and found.word == PASS:  # also where there is no figure
                found.word = INCONCLUSIVE
            reasons.append(span)
    found.reason = reasons[0] if found.word == FAIL else "; ".join(reasons)
    if {r.samples for r in runs} != {r.samples for r in base}:
        found.reason += f"; trained on {runs[0].samples:,} samples, the first arm on {base[0].samples:,}"
    return found


def _train(entry: Any, seeds: int, folder: Path, stop: Forward, say: Callable[..., None]) -> list[Trained]:
    """The arm, trained to its end once for each seed."""
    first = entry.job.run.runtime.seed
    runs = []
    for number in range(seeds):
        if stop.raised:
            raise Interrupted("stopped by a signal while the arms were trained")
        say(f"quality of {entry.label or 'the first arm'}: seed {number + 1} of {seeds}")
        words = [*entry.words, f"runtime.seed={first + number}", f"output_dir={folder}"]
        try:
            job = prepare_job(words, entry.job.composed.config_dirs, entry.job.composed.recipe)
        except UserError as error:
            raise UserError([f"{entry.label}: {p}" for p in error.problems]) from None
        _, result = run_one(SweepJob(entry.label, words, job, []), folder / str(number), stop, quiet=True)
        run = replace(read(folder / str(number)), result=result, status=result.status)
        runs.append(of_run(run, first + number, job.run.loss.best[0]))
    return runs


def of_run(run: RunFiles, seed: int, name: str) -> Trained:
    """A run's files as what is judged of it; `name` is the metric's."""
    samples = run.train.samples[-1] if run.train.samples else 0
    if run.result is None or run.status != "completed":
        error = (run.result.error if run.result else "") or "without a word"
        return Trained(seed, samples, error=f"{run.status}: {error.splitlines()[0]}")
    # Each value stands for the samples since the one before.
    points = zip(run.train.samples, [0, *run.train.samples], run.train.curve("loss"), strict=False)
    losses = [(now - before, loss) for now, before, loss in points if loss is not None]
    whole = sum(n for n, _ in losses)
    return Trained(
        seed, samples, run.result.metrics["final"].get(name), sum(n * loss for n, loss in losses) / whole if whole else math.nan
    )

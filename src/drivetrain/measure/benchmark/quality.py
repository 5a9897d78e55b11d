"""Trains the arms of a comparison to their ends, with more seeds as long as a verdict needs them, and has them judged."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from drivetrain.core.errors import UserError
from drivetrain.core.option import Count, Positive, RunSpec
from drivetrain.core.selection import Selection, evaluated, problems, selected
from drivetrain.core.target import Reach
from drivetrain.core.target import problems_of as target_problems
from drivetrain.launch.job import Job
from drivetrain.measure import overrides
from drivetrain.measure.benchmark import noninferiority
from drivetrain.measure.benchmark.arms import ArmSpec, baseline_job, trainings
from drivetrain.measure.benchmark.facts import Facts, final_figures
from drivetrain.measure.benchmark.noninferiority import TRAINING_LOSS, TrainedRun, Trial, Verdict
from drivetrain.run.reader import RunFiles

# Trains an arm with the seed of this number, counted from 0.
Train = Callable[[int, int], TrainedRun]


@dataclass
class Plan:
    """How many seeds are trained, and which figures are judged."""

    seeds: Count = 5  # trainings of each arm before the first look, and before each further one
    max_seeds: Count = 20  # while an arm is INCONCLUSIVE
    quality_s: Positive | None = None  # no further seeds after so many seconds of training; null: as many as it takes
    judge: list[str] | None = None  # evaluated figures that decide; null: the metric that ranks models, and the loss
    # A value of the metric, or accuracy>=0.98: the seconds until it is reached are judged too. null: the run's own target
    target: float | str | None = None

    def looks(self) -> Iterator[int]:
        """The numbers of seeds after which the runs are judged."""
        yield from range(self.seeds, self.max_seeds, self.seeds)
        yield max(self.seeds, self.max_seeds)


Trained = dict[tuple[str, int], TrainedRun]  # by the arm's config, and the number of the seed


def judge(
    specs: Sequence[ArmSpec], plan: Plan, progress: Callable[..., None], trained: Trained | None = None
) -> list[Verdict | None]:
    """Train every arm that can run with the same seeds; return each arm's verdict, None for an arm that cannot run.

    `trained` holds runs that an earlier comparison has trained, which are not repeated, and gets the others.
    """
    known: Trained = {} if trained is None else trained
    first = baseline_job(specs)
    claims = {n: overrides.between(first, spec.job) for n, spec in enumerate(specs) if n and spec.job is not None}
    named = [Selection(name, better) for name in plan.judge or [] if (better := evaluated(first.run)[name]) is not None]
    metric = selected(first.run)
    reach = reach_of(plan, first.run)
    target = seconds_to(reach) if reach is not None else None
    figures = {n: noninferiority.figures_for(effect, metric, named, target) for n, (effect, _) in claims.items()}
    trial = Trial.of(metric.name, claims, figures)
    with trainings("compare", first, reach, progress) as run:

        def train(arm: int, number: int) -> TrainedRun:
            key = (_config(specs[arm]), number)
            if key not in known:
                seed = first.run.runtime.seed + number
                known[key] = trained_run(run(specs[arm], seed), seed, reach)
                if (facts := known[key].facts) is not None and facts.kind == "cpu":
                    facts.peak_mib = None  # a forked process shares memory with this one: it is not that of a run by itself
            return known[key]

        base = sequentially(trial, plan, train)
    own = noninferiority.first(base, next(iter(figures.values()), []), metric.name)
    return [own if not n else trial.verdicts.get(n) for n in range(len(specs))]


def sequentially(trial: Trial, plan: Plan, train: Train) -> list[TrainedRun]:
    """Train the first arm, whose runs are returned, and the trial's undecided ones, until all are decided or the plan ends."""
    began = time.monotonic()
    runs: dict[int, list[TrainedRun]] = {n: [] for n in (0, *trial.verdicts)}
    undecided = list(trial.verdicts)
    for look in plan.looks():
        for number in range(len(runs[0]), look):
            arms = [0, *undecided]
            for arm in arms if number % 2 == 0 else reversed(arms):  # a machine's drift is not one arm's alone
                runs[arm].append(train(arm, number))
        undecided = trial.look(runs, runs[0], look / max(plan.seeds, plan.max_seeds))
        if not undecided or (plan.quality_s is not None and time.monotonic() - began > plan.quality_s):
            break
    return runs[0]


def _config(spec: ArmSpec) -> str:
    """The whole config of an arm that can run."""
    return str(spec.job.composed.plain) if spec.job is not None else ""


def check(plan: Plan, job: Job, quality: bool) -> None:
    """Raise UserError where a figure of `judge` cannot be judged, or nothing is."""
    given = [f"{key}={value}" for key in ("judge", "target", "quality_s") if (value := getattr(plan, key)) is not None]
    if given and not quality:
        raise UserError(f"{' '.join(given)} is for verdicts on quality, which need quality=true")
    if quality:
        reach_of(plan, job.run)
    if wrong := [problem for name in plan.judge or [] for problem in problems(job.run, "judge", name)]:
        raise UserError(wrong)


def reach_of(plan: Plan, run: RunSpec) -> Reach | None:
    """The target whose time is judged: the plan's, or the run's own. Raises UserError where it is none."""
    given: float | str | None = run.values["target"] if plan.target is None else plan.target
    metric = selected(run)
    if isinstance(given, float | int):
        return Reach(metric.name, metric.maximize, given)
    if wrong := list(target_problems(run, given)):
        raise UserError(wrong)
    return Reach.parse(given) if given is not None else None


def seconds_to(reach: Reach | str) -> str:
    """The name of the figure that says how long a run took to its target."""
    return f"seconds to {reach}"


def trained_run(run: RunFiles, seed: int, reach: Reach | None = None) -> TrainedRun:
    """The figures of a run's files that are judged."""
    samples = run.train.samples[-1] if run.train.samples else 0
    facts = Facts.of(run, seed, reach)
    if run.result is None or facts.error is not None:
        return TrainedRun(seed, samples, error=facts.error, facts=facts)
    trained = TrainedRun(seed, samples, final_figures(run.result.metrics.get(run.result.judged_by)), facts=facts)
    # Each recorded loss is the mean over the samples since the record before.
    points = zip(run.train.samples, [0, *run.train.samples], run.train.curve("loss"), strict=False)
    losses = [(now - before, loss) for now, before, loss in points if loss is not None]
    total = sum(count for count, _ in losses)
    trained.figures[TRAINING_LOSS] = sum(count * loss for count, loss in losses) / total if total else math.nan
    if reach is not None:  # the whole run's seconds, with start-up and compiling
        arrived = (run.result.target or {}).get("seconds")
        trained.figures[seconds_to(reach)] = run.result.wall_s if arrived is None else arrived
        trained.censored = [] if arrived is not None else [seconds_to(reach)]
    return trained

"""The test of whether a technique leaves the result as good as before: non-inferiority to the first variant.

All variants are trained with the same seeds, and compared seed by seed in their final figures on the validation data: the metric
that ranks models, and the loss. Techniques that claim to be the same mathematics (`exact` or `close` in `drivetrain list`) are
also compared in the mean training loss over the run; for others it is only shown, as they may change it on purpose. The margin is
twice the first variant's standard deviation over the seeds, or 0.5 % of its mean where that is more. PASS: every figure's
interval of the difference (Student's t) lies below the margin. FAIL: the metric's lies above it (of the same mathematics: any
figure's), or the run of a seed did not complete although the first variant's did. INCONCLUSIVE: anything else, so too few seeds
never give a PASS. While a variant is INCONCLUSIVE, more seeds are trained, up to `max_seeds`.

PASS and FAIL are each decided at a level of 5 % for all variants and all looks at the seeds together: over the variants by Holm's
step-down procedure (1979), over the figures (one is enough for a FAIL) by Bonferroni's inequality, over the looks by
alpha spending (Lan & DeMets 1983) with Pocock's spending function. The margin is measured on the same seeds, so its own
uncertainty counts too (that of a standard deviation of normal values), unless `margin` gives it.

With asks=better, seeds are added until a variant is BETTER or WORSE than the first in the metric (a margin of 0), each at a level
of 5 % for all variants and looks, by the same procedures. BETTER or WORSE is shown next to PASS and FAIL.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from drivetrain.core.errors import UserError, refuse
from drivetrain.core.options.option import Count, Effect, Positive, RunSpec
from drivetrain.core.options.selection import Figure as EvaluatedFigure
from drivetrain.core.options.selection import Reach, Selection, evaluated, problems, selected
from drivetrain.core.options.selection import problems_of as target_problems
from drivetrain.launch.job import Job
from drivetrain.measure import changes
from drivetrain.measure.benchmark.variants import (
    TRAINING_LOSS,
    Trained,
    TrainedRun,
    VariantSpec,
    baseline_job,
    in_turns,
    seconds_to,
    trainings,
)
from drivetrain.measure.intervals import Interval, deviation, mean

MARGIN_DEVIATIONS = 2.0  # the margin in standard deviations of the first variant over its seeds
MARGIN_FLOOR = 0.005  # the least margin, as a share of the first variant's mean
ALPHA = 0.05  # level of PASS, and of FAIL, over all variants and looks
NONE = 1e-9  # a mean difference below this share of its interval is rounding

PASS, FAIL, INCONCLUSIVE, FIRST = "PASS", "FAIL", "INCONCLUSIVE", "first"
BETTER, WORSE = "BETTER", "WORSE"


Asks = Literal["as good", "better"]


class JudgedFigure(NamedTuple):
    """A compared figure of runs, and its role in the verdict."""

    name: str
    sign: float = 1.0  # 1: lower is better; -1: higher is better
    needed: bool = True  # a PASS needs it
    alone: bool = True  # a worse value alone is a FAIL


@dataclass
class Verdict:
    """The outcome and its evidence. A degradation says how much worse than the first variant, in the figure's own unit."""

    outcome: str
    reason: str
    metric: str
    runs: list[TrainedRun] = field(default_factory=list)
    degradation: dict[str, Interval] = field(default_factory=dict)  # by figure
    margin: dict[str, float] = field(default_factory=dict)  # by figure
    decides: list[str] = field(default_factory=list)  # the figures that a PASS needs
    effect: Effect = "changes"  # the claim of the variant's difference
    claims: list[str] = field(default_factory=list)  # the settings that differ and claim so
    confidence: float | None = None  # of the intervals: the level of the last look
    differs: str | None = None  # with asks=better: BETTER or WORSE beyond doubt, "" where neither is known


def figures_for(
    effect: Effect, selection: Selection, judge: Sequence[Selection] = (), target: str | None = None
) -> list[JudgedFigure]:
    """The figures of a variant whose difference has this effect: those named by `judge`, else the metric and the loss."""
    same = effect != "changes"
    loss = str(EvaluatedFigure("loss", set=EvaluatedFigure.parse(selection.name).set))
    named = {s.name: s for s in judge or [selection, Selection(loss, min)]}
    alone = {name for name in named if same or judge or name == selection.name}
    found = [JudgedFigure(name, -1.0 if s.maximize else 1.0, alone=name in alone) for name, s in named.items()]
    return [*found, *([JudgedFigure(target)] if target else []), JudgedFigure(TRAINING_LOSS, needed=same, alone=same)]


class _Evidence:
    """The comparison of a variant with the first one in one figure."""

    def __init__(
        self, figure: JudgedFigure, runs: Sequence[TrainedRun], base: Sequence[TrainedRun], margin: float | None = None
    ) -> None:
        """`margin` is the largest difference that counts as none; None: it is measured on the first variant."""
        self.figure = figure
        before, after = ([run.figures.get(figure.name, math.nan) for run in each] for each in (base, runs))
        self.before, self.after = before, after
        self.worse_by = [figure.sign * (a - b) for a, b in zip(after, before, strict=True)]
        measured, floor = MARGIN_DEVIATIONS * deviation(before), MARGIN_FLOOR * abs(sum(before) / len(before))
        self.margin = max(measured, floor) if margin is None else margin
        self.uncertain = self.margin if margin is None and measured > floor else 0.0  # the measured part
        self.reached = reached(figure.name, runs), reached(figure.name, base)
        self.censored = sum(self.reached) < len(runs) + len(base)
        p_pass, p_fail = self._p()
        self.p_pass = 1.0 if self.censored else p_pass  # it may be far worse: never a PASS
        self.p_fail = p_fail if self.reached[1] == len(base) else 1.0

    def _p(self) -> tuple[float, float]:
        """The p-values of these runs under two hypotheses: the variant is worse by at least the margin; by at most the margin."""
        from scipy.special import stdtr  # scipy.stats takes a second to import

        n = len(self.worse_by)
        if not any(self.worse_by):  # the same, whatever the margin
            return 0.0, 1.0
        error = deviation(self.worse_by) / math.sqrt(n)
        beyond = sum(self.worse_by) / n - self.margin
        if not math.isfinite(error) or math.isnan(beyond):
            return 1.0, 1.0
        if self.uncertain:
            return _p_beyond_margin(-beyond, error, self.uncertain, n, 1), _p_beyond_margin(beyond, error, self.uncertain, n, -1)
        if error == 0:
            return (0.0, 1.0) if beyond <= 0 else (1.0, 0.0)
        return float(stdtr(n - 1, beyond / error)), float(stdtr(n - 1, -beyond / error))

    def text(self, confidence: float) -> str:
        """The difference in words. A figure that is only a lower bound gives no difference."""
        if self.censored:
            mine, theirs, n = *self.reached, len(self.before)
            return f"{self.figure.name}: {mine} of {n} seeds got there, and {theirs} of {n} of the first variant"
        decides = f"allowed {self.margin:.2g}" if self.figure.needed else "it does not decide"
        return f"{self.figure.name} {in_words(*mean(self.worse_by, confidence))}, {decides}"


def _p_beyond_margin(gap: float, error: float, deviations: float, count: int, side: int) -> float:
    """The p-value of a mean difference that lies `gap` beyond a margin that was also measured; 1 without a gap.

    The one-sided limits of the difference and of the margin are joined as for independent quantities (MOVER, Zou & Donner 2008).
    `error` is the standard error of the difference, `deviations` the margin, from a standard deviation over `count` seeds.
    `side` is 1 where a smaller margin would spoil the answer (a PASS), -1 where a larger one would (a FAIL).
    """
    from scipy.special import chdtri, stdtrit

    low, high = 0.0, 0.5
    for _ in range(30 if gap > 0 else 0):
        level = (low + high) / 2
        limit = math.sqrt((count - 1) / float(chdtri(count - 1, level if side > 0 else 1 - level)))
        if math.hypot(float(stdtrit(count - 1, 1 - level)) * error, (limit - 1) * deviations) <= gap:
            high = level
        else:
            low = level
    return high if high < 0.5 else 1.0


def reached(name: str, runs: Sequence[TrainedRun]) -> int:
    """The number of runs with the figure itself, not a bound."""
    return sum(name not in run.censored for run in runs)


def in_words(worse_by: float, low: float, high: float) -> str:
    """By how much a variant is worse than another, and the interval, in words. A difference of rounding counts as none."""
    if max(abs(low), abs(high)) == 0:
        return "the same"
    if abs(worse_by) < NONE * max(abs(low), abs(high)):
        return f"the same on average ({low:.2g} to {high:.2g})"
    word, least, most = ("better", -high, -low) if worse_by < 0 else ("worse", low, high)
    return f"{word} by {abs(worse_by):.2g} ({least:.2g} to {most:.2g})"


@dataclass
class Trial:
    """Variants judged together, at one or several looks at their seeds. Only an INCONCLUSIVE one is judged again."""

    verdicts: dict[int, Verdict]  # by the variant's number; before the first look without an outcome
    figures: dict[int, list[JudgedFigure]]
    asks: Asks = "as good"
    margin: float | None = None  # the metric's; None: it is measured
    alpha: float = ALPHA
    spent: float = 0.0  # of alpha, by the looks so far

    @classmethod
    def of(
        cls, metric: str, claims: dict[int, tuple[Effect, list[str]]], figures: dict[int, list[JudgedFigure]],
        asks: Asks = "as good", margin: float | None = None, alpha: float = ALPHA,
    ) -> Trial:  # fmt: skip
        """A trial of these variants; `claims` has the claim of each one's difference from the first variant."""
        differs = "" if asks == "better" else None
        verdicts = {
            n: Verdict(INCONCLUSIVE, "", metric, effect=effect, claims=names, differs=differs)
            for n, (effect, names) in claims.items()
        }
        return cls(verdicts, figures, asks, margin, alpha)

    def look(self, runs: dict[int, list[TrainedRun]], base: list[TrainedRun], share: float = 1.0) -> list[int]:
        """Judge the undecided variants after `share` of the allowed seeds; return those still undecided."""
        level = spending(share, self.alpha) - self.spent
        self.spent += level
        evidence = {}
        levels = self._compare(runs, base, level) if self.asks == "better" else {}
        undecided = [n for n, v in self.verdicts.items() if v.outcome == INCONCLUSIVE and len(runs[n]) == len(base)]
        for n in [n for n in self.verdicts if n in undecided or n in levels]:
            verdict = self.verdicts[n]
            verdict.runs = runs[n]
            if failed := next((run for run in base if run.error), None):
                verdict.reason = f"the first variant's own run with seed {failed.seed} ended: {failed.error}"
            elif failed := next((run for run in runs[n] if run.error), None):
                verdict.outcome, verdict.reason = FAIL, f"the run with seed {failed.seed} ended: {failed.error}"
            elif len(base) < 2:
                verdict.reason = "one seed shows no spread: set seeds=5"
            else:
                evidence[n] = [
                    _Evidence(figure, runs[n], base, self.margin if figure.name == verdict.metric else None)
                    for figure in self.figures[n]
                ]
        open_ = {n: found for n, found in evidence.items() if n in undecided}
        passing = {n: max(e.p_pass for e in found if e.figure.needed) for n, found in open_.items()}
        failing = {n: min(1.0, len(a) * min(a)) for n, e in open_.items() if (a := [f.p_fail for f in e if f.figure.alone])}
        levels = self._decide(PASS, passing, level) | levels
        self._decide(FAIL, failing, level)
        for n, found in evidence.items():
            _describe(self.verdicts[n], found, base, 1 - 2 * levels[n])
        if any(run.error for run in base):
            return []
        if self.asks == "better":
            return [n for n, v in self.verdicts.items() if v.differs == "" and not any(run.error for run in runs[n])]
        return [n for n in undecided if self.verdicts[n].outcome == INCONCLUSIVE and not _stuck(evidence.get(n, ()), level)]

    def _compare(self, runs: dict[int, list[TrainedRun]], base: list[TrainedRun], level: float) -> dict[int, float]:
        """Decide which variants are better or worse than the first in the metric; return the level of each one's test."""
        better, worse = dict[int, float](), dict[int, float]()
        for n, verdict in self.verdicts.items():
            if verdict.differs == "" and len(base) > 1 and not any(run.error for run in (*runs[n], *base)):
                of_metric = next(figure for figure in self.figures[n] if figure.name == verdict.metric)
                found = _Evidence(of_metric, runs[n], base, 0.0)
                same = not any(found.worse_by)
                better[n], worse[n] = (1.0, 1.0) if same else (found.p_pass, found.p_fail)
        levels = dict.fromkeys(better, level / len(self.verdicts))
        for p, word in ((better, BETTER), (worse, WORSE)):
            known = sum(verdict.differs == word for verdict in self.verdicts.values())
            for n in sorted(p, key=lambda n: p[n]):
                if p[n] > (least := level / (len(self.verdicts) - known)):
                    break
                self.verdicts[n].differs, levels[n] = word, least
                known += 1
        return levels

    def _decide(self, outcome: str, p: dict[int, float], level: float) -> dict[int, float]:
        """Holm's procedure: give the outcome to the variants whose p allows it; return the level at which each was tested.

        Variants with the outcome from an earlier look count as rejected, so that all looks share one family.
        """
        decided = sum(v.outcome == outcome and bool(v.margin) for v in self.verdicts.values())
        levels, open_ = {}, True
        for n in sorted(p, key=lambda n: p[n]):
            levels[n] = level / (len(self.verdicts) - decided)
            open_ = open_ and p[n] <= levels[n]
            if open_:
                self.verdicts[n].outcome = outcome
                decided += 1
        return levels


def spending(share: float, alpha: float = ALPHA) -> float:
    """The part of `alpha` that may be spent when `share` of the seeds have been trained (Pocock's function)."""
    return alpha * math.log(1 + (math.e - 1) * min(1.0, share))


def verdict(runs: list[TrainedRun], base: list[TrainedRun], selection: Selection, effect: Effect = "changes") -> Verdict:
    """The verdict on one variant's `runs` against those of the first variant, by one look at all of their seeds."""
    trial = Trial.of(selection.name, {1: (effect, [])}, {1: figures_for(effect, selection)})
    trial.look({1: runs}, base)
    return trial.verdicts[1]


def of_first(runs: list[TrainedRun], figures: Sequence[JudgedFigure], metric: str) -> Verdict:
    """The row of the first variant, whose own spread the others are compared with."""
    if failed := next((run for run in runs if run.error), None):
        return Verdict(INCONCLUSIVE, f"the run with seed {failed.seed} ended: {failed.error}", metric, runs)
    spreads = [_spread(figure.name, runs) for figure in figures]
    return Verdict(FIRST, f"{', '.join(spreads)} over {len(runs)} seeds", metric, runs)


def _spread(name: str, runs: Sequence[TrainedRun]) -> str:
    """A figure's mean and standard deviation over the runs, in words."""
    if (known := reached(name, runs)) < len(runs):
        return f"{name}: {known} of {len(runs)} got there"
    values = [run.figures.get(name, math.nan) for run in runs]
    return f"{name} {sum(values) / len(values):.4g}" + (f" ± {deviation(values):.2g}" if len(values) > 1 else "")


def _stuck(found: Sequence[_Evidence], level: float) -> bool:
    """True if more seeds would not help: no figure that can FAIL is worse, but a figure that a PASS needs is."""
    worse = any(e.p_fail <= level for e in found if e.figure.needed and not e.figure.alone)
    return worse and all(e.p_pass <= level for e in found if e.figure.alone)


def _describe(verdict: Verdict, found: Sequence[_Evidence], base: Sequence[TrainedRun], confidence: float) -> None:
    """Set a verdict's evidence, reason and basis: for a FAIL the worse figures, else every figure."""
    verdict.confidence = confidence
    verdict.decides = [e.figure.name for e in found if e.figure.needed]
    for e in found:
        verdict.margin[e.figure.name] = e.margin
        verdict.degradation.pop(e.figure.name, None)  # of an earlier look, when all seeds had the figure
        if not e.censored:
            verdict.degradation[e.figure.name] = mean(e.worse_by, confidence)
    shown = [min((e for e in found if e.figure.alone), key=lambda e: e.p_fail)] if verdict.outcome == FAIL else found
    told = [e.text(confidence) for e in shown]
    if verdict.outcome == INCONCLUSIVE and _stuck(found, ALPHA):
        metric = verdict.metric
        told.append(f"a technique that changes training may move the loss alone: judge=[{metric}] lets {metric} decide")
    if {run.samples for run in verdict.runs} != {run.samples for run in base}:
        told.append(f"trained on {verdict.runs[0].samples:,} samples, the first variant on {base[0].samples:,}")
    verdict.reason = "; ".join(told)
    if verdict.differs:
        verdict.reason = f"{verdict.differs}; {verdict.reason}"


# Trains a variant with the seed of this number, counted from 0.
Train = Callable[[int, int], TrainedRun]


@dataclass
class QualitySettings:
    """The number of seeds to train, and the figures to judge."""

    seeds: Count = 5  # trainings of each variant before the first look, and before each further one
    max_seeds: Count = 20  # while a variant is INCONCLUSIVE
    quality_s: Positive | None = None  # no further seeds after these seconds of training; null: no limit
    judge: list[str] | None = None  # evaluated figures that decide; null: the metric that ranks models, and the loss
    # A value of the metric, or accuracy>=0.98: the seconds until it is reached are judged too. null: the run's own target
    target: float | str | None = None
    asks: Asks = "as good"  # better: more seeds also until a variant is known to be better, or worse
    margin: Positive | None = (
        None  # the largest difference of the metric that counts as none; null: measured on the first variant
    )

    def looks(self) -> Iterator[int]:
        """The numbers of seeds after which the runs are judged."""
        yield from range(self.seeds, self.max_seeds, self.seeds)
        yield max(self.seeds, self.max_seeds)


def judge(
    specs: Sequence[VariantSpec], plan: QualitySettings, progress: Callable[..., None], trained: Trained | None = None
) -> list[Verdict | None]:
    """Train every variant that can run with the same seeds; return each variant's verdict, None for a variant that cannot run.

    `trained` holds runs that an earlier comparison has trained, which are not repeated, and gets the others.
    """
    first = baseline_job(specs)
    claims = {n: changes.between(first, spec.job) for n, spec in enumerate(specs) if n and spec.job is not None}
    named = [Selection(name, better) for name in plan.judge or [] if (better := evaluated(first.run)[name]) is not None]
    metric = selected(first.run).across_runs
    reach = reach_of(plan, first.run)
    target = seconds_to(reach) if reach is not None else None
    figures = {n: figures_for(effect, metric, named, target) for n, (effect, _) in claims.items()}
    trial = Trial.of(metric.name, claims, figures, plan.asks, plan.margin)
    with trainings("compare", first, reach, progress, trained) as train:
        base = sequentially(trial, plan, lambda variant, number: train(specs[variant], first.run.runtime.seed + number))
    own = of_first(base, next(iter(figures.values()), []), metric.name)
    return [own if not n else trial.verdicts.get(n) for n in range(len(specs))]


def sequentially(trial: Trial, plan: QualitySettings, train: Train) -> list[TrainedRun]:
    """Train the first variant, whose runs are returned, and the undecided ones, until all are decided or the plan ends."""
    began = time.monotonic()
    runs: dict[int, list[TrainedRun]] = {n: [] for n in (0, *trial.verdicts)}
    undecided = list(trial.verdicts)
    for look in plan.looks():
        for number in range(len(runs[0]), look):
            for variant in in_turns([0, *undecided], number):
                runs[variant].append(train(variant, number))
        undecided = trial.look(runs, runs[0], look / max(plan.seeds, plan.max_seeds))
        if not undecided or (plan.quality_s is not None and time.monotonic() - began > plan.quality_s):
            break
    return runs[0]


def check(plan: QualitySettings, job: Job, quality: bool) -> None:
    """Raise UserError where a figure of `judge` cannot be judged, or nothing is."""
    asks = plan.asks if plan.asks != "as good" else None
    of_quality = {"judge": plan.judge, "target": plan.target, "quality_s": plan.quality_s, "asks": asks, "margin": plan.margin}
    given = [f"{key}={value}" for key, value in of_quality.items() if value is not None]
    if given and not quality:
        raise UserError(f"{' '.join(given)} is for verdicts on quality, which need quality=true")
    if quality:
        reach_of(plan, job.run)
    refuse(problem for name in plan.judge or [] for problem in problems(job.run, "judge", name))


def reach_of(plan: QualitySettings, run: RunSpec) -> Reach | None:
    """The target for the judged time: the plan's, or the run's own. Raises UserError for an invalid one."""
    given: float | str | None = run.values["target"] if plan.target is None else plan.target
    metric = selected(run).across_runs
    if isinstance(given, float | int):
        return Reach(metric.name, metric.maximize, given)
    refuse(target_problems(run, given))
    return Reach.parse(given) if given is not None else None

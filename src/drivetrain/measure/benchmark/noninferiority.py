"""Whether a technique leaves the result as good as before: a non-inferiority test against the first arm.

All arms are trained with the same seeds, and compared seed by seed in what their runs end with on the validation data: the
metric that ranks models, and the loss. Techniques that claim to be the same mathematics (`exact` or `close` in `drivetrain
list`) are also compared in the mean training loss over the run; of others it is shown, as they may change it on purpose.
The margin is twice the first arm's standard deviation over the seeds, or 0.5 % of its mean where that is more. PASS: every
figure's interval of the difference (Student's t) lies below the margin. FAIL: the metric's lies above it (of the same
mathematics: any figure's), or a run did not complete that the first arm completed. INCONCLUSIVE: anything else, so too few
seeds never give a PASS. While an arm is INCONCLUSIVE, more seeds are trained, up to `max_seeds`.

PASS and FAIL are each decided at a level of 5 % for all arms and all looks at the seeds together: over the arms by Holm's
step-down procedure (1979), over the figures of which one is enough for a FAIL by Bonferroni's inequality, over the looks by
alpha spending (Lan & DeMets 1983) with Pocock's spending function. The margin counts as known, although it is measured on the
same seeds: with 20 seeds, an arm that is worse by one standard deviation FAILs in 1 % of the cases, one that is worse by three
PASSes in 0.1 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from drivetrain.core.figure import Figure as EvaluatedFigure
from drivetrain.core.option import Effect
from drivetrain.core.selection import Selection
from drivetrain.measure.benchmark.facts import Facts
from drivetrain.measure.intervals import Interval, deviation, mean

MARGIN_DEVIATIONS = 2.0  # the margin in standard deviations of the first arm over its seeds
MARGIN_FLOOR = 0.005  # the least margin, as a share of the first arm's mean
ALPHA = 0.05  # level of PASS, and of FAIL, over all arms and looks
NONE = 1e-9  # a mean difference below this share of its interval is what rounding leaves

PASS, FAIL, INCONCLUSIVE, FIRST = "PASS", "FAIL", "INCONCLUSIVE", "first"
TRAINING_LOSS = "training loss"


class Figure(NamedTuple):
    """A figure that runs are compared in, and what it decides."""

    name: str
    sign: float = 1.0  # 1: lower is better; -1: higher is better
    needed: bool = True  # a PASS needs it
    alone: bool = True  # if it is worse, that alone is a FAIL


@dataclass
class TrainedRun:
    """One arm trained with one seed."""

    seed: int
    samples: int
    figures: dict[str, float] = field(default_factory=dict)  # by name
    censored: list[str] = field(default_factory=list)  # figures that are at least so much: the time to a target never reached
    error: str | None = None
    facts: Facts | None = None  # what else its files say of it


@dataclass
class Verdict:
    """The outcome and its evidence. A degradation says how much worse than the first arm, in the figure's own unit."""

    outcome: str
    reason: str
    metric: str
    runs: list[TrainedRun] = field(default_factory=list)
    degradation: dict[str, Interval] = field(default_factory=dict)  # by figure
    margin: dict[str, float] = field(default_factory=dict)  # by figure
    decides: list[str] = field(default_factory=list)  # the figures that a PASS needs
    effect: Effect = "changes"  # what the arm's difference claims
    claims: list[str] = field(default_factory=list)  # the settings that differ and claim so
    confidence: float | None = None  # of the intervals: that at which the last look decided


def figures_for(effect: Effect, selection: Selection, judge: Sequence[Selection] = (), target: str | None = None) -> list[Figure]:
    """The figures of an arm whose difference has this effect: those that `judge` names, or else the metric and the loss."""
    same = effect != "changes"
    loss = str(EvaluatedFigure("loss", set=EvaluatedFigure.parse(selection.name).set))
    named = {s.name: s for s in judge or [selection, Selection(loss, min)]}
    alone = {name for name in named if same or judge or name == selection.name}
    found = [Figure(name, -1.0 if s.maximize else 1.0, alone=name in alone) for name, s in named.items()]
    return [*found, *([Figure(target)] if target else []), Figure(TRAINING_LOSS, needed=same, alone=same)]


class _Evidence:
    """How an arm compares with the first one in one figure."""

    def __init__(self, figure: Figure, runs: Sequence[TrainedRun], base: Sequence[TrainedRun]) -> None:
        self.figure = figure
        before, after = ([run.figures.get(figure.name, math.nan) for run in each] for each in (base, runs))
        self.before, self.after = before, after
        self.worse_by = [figure.sign * (a - b) for a, b in zip(after, before, strict=True)]
        self.margin = max(MARGIN_DEVIATIONS * deviation(before), MARGIN_FLOOR * abs(sum(before) / len(before)))
        self.p_pass, self.p_fail = self._p()
        self.reached = reached(figure.name, runs), reached(figure.name, base)
        self.censored = sum(self.reached) < len(runs) + len(base)
        if self.censored:  # it may be much more: never a PASS
            self.p_pass = 1.0
        if self.reached[1] < len(base):
            self.p_fail = 1.0

    def _p(self) -> tuple[float, float]:
        """The probabilities of such runs, or of clearer ones: where the arm is worse by the margin or more; by no more."""
        from scipy.stats import t

        spread, n = deviation(self.worse_by), len(self.worse_by)
        beyond = sum(self.worse_by) / n - self.margin
        if not math.isfinite(spread) or math.isnan(beyond):
            return 1.0, 1.0
        if spread == 0:
            return (0.0, 1.0) if beyond <= 0 else (1.0, 0.0)
        statistic = beyond / (spread / math.sqrt(n))
        return float(t.cdf(statistic, n - 1)), float(t.sf(statistic, n - 1))

    def text(self, confidence: float) -> str:
        """The difference in words. Where a run's figure is only known to be at least so much, it is no difference."""
        if self.censored:
            mine, theirs, n = *self.reached, len(self.before)
            return f"{self.figure.name}: {mine} of {n} seeds got there, and {theirs} of {n} of the first arm"
        decides = f"allowed {self.margin:.2g}" if self.figure.needed else "it does not decide"
        return f"{self.figure.name} {in_words(*mean(self.worse_by, confidence))}, {decides}"


def reached(name: str, runs: Sequence[TrainedRun]) -> int:
    """How many of the runs have the figure itself, and not a bound of it."""
    return sum(name not in run.censored for run in runs)


def in_words(worse_by: float, low: float, high: float) -> str:
    """By how much an arm is worse than another, and the interval, in words. What rounding leaves of none is none."""
    if max(abs(low), abs(high)) == 0:
        return "the same"
    if abs(worse_by) < NONE * max(abs(low), abs(high)):
        return f"the same on average ({low:.2g} to {high:.2g})"
    word, least, most = ("better", -high, -low) if worse_by < 0 else ("worse", low, high)
    return f"{word} by {abs(worse_by):.2g} ({least:.2g} to {most:.2g})"


@dataclass
class Trial:
    """Arms that are judged together, at one look at their seeds or at several. Only an INCONCLUSIVE arm is judged again."""

    verdicts: dict[int, Verdict]  # by the arm's number; before the first look without an outcome
    figures: dict[int, list[Figure]]
    spent: float = 0.0  # of ALPHA, by the looks so far

    @classmethod
    def of(cls, metric: str, claims: dict[int, tuple[Effect, list[str]]], figures: dict[int, list[Figure]]) -> Trial:
        """A trial of these arms; `claims` has what the difference of each from the first arm claims."""
        verdicts = {n: Verdict(INCONCLUSIVE, "", metric, effect=effect, claims=names) for n, (effect, names) in claims.items()}
        return cls(verdicts, figures)

    def look(self, runs: dict[int, list[TrainedRun]], base: list[TrainedRun], share: float = 1.0) -> list[int]:
        """Judge the undecided arms, when `share` of the seeds that may be trained have been; return those still undecided."""
        level = spending(share) - self.spent
        self.spent += level
        evidence = {}
        for n in [n for n, v in self.verdicts.items() if v.outcome == INCONCLUSIVE]:
            verdict = self.verdicts[n]
            verdict.runs = runs[n]
            if settled := _without_test(runs[n], base):
                verdict.outcome, verdict.reason = settled
            elif len(base) < 2:
                verdict.reason = "one seed shows no spread: set seeds=5"
            else:
                evidence[n] = [_Evidence(figure, runs[n], base) for figure in self.figures[n]]
        passing = {n: max(e.p_pass for e in found if e.figure.needed) for n, found in evidence.items()}
        failing = {n: min(1.0, len(a) * min(a)) for n, e in evidence.items() if (a := [f.p_fail for f in e if f.figure.alone])}
        levels = self._decide(PASS, passing, level)
        self._decide(FAIL, failing, level)
        for n, found in evidence.items():
            _describe(self.verdicts[n], found, base, 1 - 2 * levels[n])
        undecided = [n for n, v in self.verdicts.items() if v.outcome == INCONCLUSIVE and not any(run.error for run in base)]
        return [n for n in undecided if not _stuck(evidence.get(n, ()), level)]

    def _decide(self, outcome: str, p: dict[int, float], level: float) -> dict[int, float]:
        """Holm's procedure: give the outcome to the arms whose p allows it; return the level at which each was tested.

        The arms that have the outcome from a look before count as rejected ones, so that all looks share one family.
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


def spending(share: float) -> float:
    """The part of ALPHA that may be spent when `share` of the seeds have been trained (Pocock's function)."""
    return ALPHA * math.log(1 + (math.e - 1) * min(1.0, share))


def verdict(runs: list[TrainedRun], base: list[TrainedRun], selection: Selection, effect: Effect = "changes") -> Verdict:
    """The verdict on one arm's `runs` against those of the first arm, by one look at all of their seeds."""
    trial = Trial.of(selection.name, {1: (effect, [])}, {1: figures_for(effect, selection)})
    trial.look({1: runs}, base)
    return trial.verdicts[1]


def first(runs: list[TrainedRun], figures: Sequence[Figure], metric: str) -> Verdict:
    """The row of the first arm, whose own spread the others are compared with."""
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


def _without_test(runs: Sequence[TrainedRun], base: Sequence[TrainedRun]) -> tuple[str, str] | None:
    """The outcome and the reason where no test is needed, or none is possible."""
    if failed := next((run for run in base if run.error), None):
        return INCONCLUSIVE, f"the first arm's own run with seed {failed.seed} ended: {failed.error}"
    if failed := next((run for run in runs if run.error), None):
        return FAIL, f"the run with seed {failed.seed} ended: {failed.error}"
    return None


def _stuck(found: Sequence[_Evidence], level: float) -> bool:
    """Whether more seeds would not help: what may FAIL the arm is as good as before, what a PASS needs too is worse."""
    worse = any(e.p_fail <= level for e in found if e.figure.needed and not e.figure.alone)
    return worse and all(e.p_pass <= level for e in found if e.figure.alone)


def _describe(verdict: Verdict, found: Sequence[_Evidence], base: Sequence[TrainedRun], confidence: float) -> None:
    """Set a verdict's evidence and its reason: of a FAIL what is worse, else every figure."""
    verdict.confidence = confidence
    verdict.decides = [e.figure.name for e in found if e.figure.needed]
    for e in found:
        verdict.margin[e.figure.name] = e.margin
        verdict.degradation.pop(e.figure.name, None)  # of a look before, when all seeds had the figure
        if not e.censored:
            verdict.degradation[e.figure.name] = mean(e.worse_by, confidence)
    if verdict.outcome == FAIL:
        worst = min((e for e in found if e.figure.alone), key=lambda e: e.p_fail)
        texts = [worst.text(confidence)]
    else:
        texts = [e.text(confidence) for e in found]
    verdict.reason = "; ".join([*texts, *_remarks(verdict, found, base)])


def _remarks(verdict: Verdict, found: Sequence[_Evidence], base: Sequence[TrainedRun]) -> Iterator[str]:
    if verdict.outcome == INCONCLUSIVE and _stuck(found, ALPHA):
        metric = verdict.metric
        yield f"a technique that changes training may move the loss alone: judge=[{metric}] lets {metric} decide"
    if {run.samples for run in verdict.runs} != {run.samples for run in base}:
        yield f"trained on {verdict.runs[0].samples:,} samples, the first arm on {base[0].samples:,}"

"""`drivetrain recipe verify`: measures the claims of a recipe again, and answers by kind.

The speed is measured as `drivetrain compare` does, in turns with the claim's baseline. Everything else is measured by training
the recipe to its end with seeds that the claim did not have.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.config.catalog import options
from drivetrain.core.errors import DONE, FAILED, UserError, printable, refuse
from drivetrain.core.options.groups import Better
from drivetrain.core.options.overrides import format_value, key_of
from drivetrain.core.options.selection import Reach, evaluated
from drivetrain.core.typed import JsonObject
from drivetrain.launch.job import Job
from drivetrain.measure import verbs
from drivetrain.measure.benchmark import compare, quality, variants
from drivetrain.measure.benchmark.variants import Facts, VariantSpec, trainings
from drivetrain.measure.intervals import MIN_PAIRS, deviation, mean
from drivetrain.recipe import claims, lookup
from drivetrain.recipe.reader import Recipe
from drivetrain.run import environment
from drivetrain.ui import sheet
from drivetrain.ui.output import echo
from drivetrain.ui.progress import Steps

HOLDS, REFUTED, UNTOLD, SKIPPED = "holds", "does not hold", "cannot be told here", "not measured"
NOTHING_TOLD = 4  # the exit code if nothing was refuted and nothing could be decided
LEVEL = 0.02  # of a refutation by chance
FLOOR = 0.005  # a metric may always be worse by this share of its mean
WIDE = 0.05  # a larger allowance for chance confirms nothing, unless within 2 standard deviations of the new seeds
MIN_FREEDOM = 3  # degrees of freedom of a spread that may confirm a claim
MORE_MEMORY, MORE_ENERGY = 0.10, 0.25  # shares that runs may need beyond the claim
SLOWER = 2.0  # a machine's speed may differ by this factor from one hour to the next, and the median updates of a few seeds


class Answer(NamedTuple):
    """The answer of a new measurement to one kind of claim."""

    kind: str
    claimed: str
    measured: str
    outcome: str
    because: str


@dataclass(frozen=True)
class Differences:
    """The differences between this machine and its data and those of a claim, in words; "" where they are the same."""

    kind: str = ""  # the device's type
    device: str = ""
    versions: str = ""
    data: str = ""

    @classmethod
    def of(cls, claim: claims.Claim, kind: str | None, device: str | None, data: object = None) -> Differences:
        """The differences of a run on this device; `data` is the fingerprint of its data, if known."""
        versions = [(name, claimed, environment.version(name)) for name, claimed in claim.versions.items()]
        other = [
            f"{name} {here}, claimed with {claimed}"
            for name, claimed, here in versions
            if here is not None and here.split(".")[0] != claimed.split(".")[0]  # other major versions
        ]
        return cls(
            f"{kind}, claimed on {claim.device.kind}" if kind is not None and kind != claim.device.kind else "",
            printable(f"{device}, claimed on {claim.device.name}") if device is not None and device != claim.device.name else "",
            printable("; ".join(other)),
            _other_data(claim.data, data) if claim.data is not None else "",
        )

    @property
    def hardware(self) -> str:
        """The differences of the machine and its software."""
        return "; ".join(filter(None, (self.device or self.kind, self.versions)))


def _other_data(claimed: claims.DataSection, here: object) -> str:
    if not isinstance(here, dict) or not isinstance(here.get("hash"), str):
        return "the data here has no fingerprint"
    if here["hash"] == claimed.hash:
        return ""
    samples = f"{here.get('samples')} samples here, {claimed.samples} claimed" if here.get("samples") != claimed.samples else ""
    return printable(f"{samples or 'the same number of samples'}, fingerprint {here['hash'][:8]}, claimed {claimed.hash[:8]}")


@dataclass
class ClaimRuns:
    """Runs trained here to test a claim."""

    runs: list[Facts]
    differ: Differences
    better: Mapping[str, Better | None] = field(default_factory=dict)  # by metric


@dataclass(frozen=True)
class OfRuns:
    """One kind of claim: its computation from runs, and its test.

    `made` gets the runs, and the claimed metric with its set if it differs from the judging one; it returns None if they did
    not measure it. `judge` gets the claim, the same figure of new runs, and the runs, and returns the outcome and the reason.
    """

    key: str
    made: Callable[[Sequence[Facts], str | None, str | None], claims.Kind | None]
    judge: Callable[[Any, Any, ClaimRuns], tuple[str, str]]
    needs_device: bool = False  # whether only the same device can decide it

    def cannot_tell(self, differ: Differences) -> str:
        """The reason why it cannot be decided here, or ""."""
        if differ.data:
            return f"other data: {differ.data}"
        return f"another device: {differ.device or differ.kind}" if self.needs_device and (differ.device or differ.kind) else ""

    def answer(self, claim: claims.Claim, seen: ClaimRuns) -> Answer:
        """The answer whether a claim holds for the runs trained here."""
        metric, of_set = (claim.quality.metric, claim.quality.set) if claim.quality is not None else (None, None)
        claimed, again = claim.kinds()[self.key], self.made(seen.runs, metric, of_set)
        if failed := next((run for run in seen.runs if run.error is not None), None):
            outcome, because = UNTOLD if seen.differ.kind else REFUTED, f"the run with seed {failed.seed} ended: {failed.error}"
        elif because := self.cannot_tell(seen.differ):
            outcome = UNTOLD
        elif again is None:
            outcome, because = UNTOLD, "it is not measured here"
        else:
            outcome, because = self.judge(claimed, again, seen)
        return Answer(self.key, str(claimed), str(again) if again is not None else "–", outcome, because)


def final_metric(runs: Sequence[Facts], metric: str | None, of_set: str | None) -> claims.Quality | None:
    """The final metric of all runs."""
    of_set = of_set or runs[0].set
    values = [value for run in runs if (value := run.figures.get(of_set, {}).get(str(metric))) is not None]
    if len(values) < len(runs) or metric is None:
        return None
    middle, low, high = mean(values)
    sd, interval = (rounded(deviation(values)), (rounded(low), rounded(high))) if len(values) > 1 else (None, None)
    return claims.Quality(metric, of_set, rounded(middle), len(values), sd, interval)


def same_metric(claimed: claims.Quality, again: claims.Quality, seen: ClaimRuns) -> tuple[str, str]:
    """A two-sample t-test of the claimed mean against that of new seeds, with their spreads pooled."""
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    freedom = claimed.n + again.n - 2
    if not freedom:
        return UNTOLD, "one run each shows no spread: set seeds=5"
    better = seen.better.get(claimed.metric)
    apart = again.mean - claimed.mean
    worse_by = abs(apart) if better is None else -apart if better(0.0, 1.0) == 1.0 else apart
    squares = (claimed.n - 1) * (claimed.sd or 0.0) ** 2 + (again.n - 1) * (again.sd or 0.0) ** 2
    error = math.sqrt(squares / freedom * (1 / claimed.n + 1 / again.n))
    by_chance = float(stdtrit(freedom, 1 - (LEVEL / 2 if better is None else LEVEL))) * error
    allowed = max(by_chance, FLOOR * abs(claimed.mean))
    word = "apart" if better is None else "worse"
    if worse_by > allowed:
        return REFUTED, f"{word} by {worse_by:.2g}; chance allows {allowed:.2g} (t-test at {100 * LEVEL:g} %)"
    more = f"too few seeds: set seeds={max(5, 2 * again.n)}"
    if freedom < MIN_FREEDOM:
        return UNTOLD, f"{more} ({claimed.n} and {again.n} runs hardly show the spread)"
    # Only of the new seeds: else a claim with a large spread would allow itself anything.
    if worse_by > FLOOR * abs(claimed.mean) and by_chance > max(WIDE * abs(claimed.mean), 2 * (again.sd or 0.0)):
        return UNTOLD, f"{more} (it is {word} by {worse_by:.2g}, and chance allows {by_chance:.2g})"
    return HOLDS, f"not {word} by more than {allowed:.2g} (t-test at {100 * LEVEL:g} %, at least {100 * FLOOR:g} %)"


def time_to_target(runs: Sequence[Facts], metric: str | None, of_set: str | None) -> claims.Target | None:
    """The time at which a metric of the runs reached their target; a run that did not counts as the slowest."""
    if (reach := runs[0].reach) is None:
        return None
    there = [run for run in runs if run.updates_to_target is not None]
    never = [math.inf] * (len(runs) - len(there))
    updates = [run.updates_to_target for run in there if run.updates_to_target is not None]
    seconds = [run.seconds_to_target for run in there if run.seconds_to_target is not None]
    several = 2 * len(there) > len(runs)  # else their median is infinite
    return claims.Target(
        reach, len(there), len(runs), rounded(statistics.median([*updates, *never])) if several else None,
        None if never else max(updates),
        rounded(statistics.median([*seconds, *never])) if several and len(seconds) == len(there) else None,
    )  # fmt: skip


def as_soon(claimed: claims.Target, again: claims.Target, seen: ClaimRuns) -> tuple[str, str]:
    """Exact tests of the number of seeds that reached the target, and of every one being slower."""
    fewer = chance_of_fewer(again.reached, again.n, claimed.reached, claimed.n)
    found = [run.updates_to_target for run in seen.runs]
    slower = claimed.slowest is not None and all(u is None or u > claimed.slowest for u in found)
    all_slower = 1 / math.comb(claimed.n + again.n, again.n) if slower else 1.0
    if (chance := min(fewer, all_slower)) <= LEVEL:
        why = "fewer seeds reach it" if fewer <= all_slower else "every seed needs more updates than the slowest claimed one"
        return REFUTED, f"{why}: {100 * chance:.1f} % by chance"
    if slower or (claimed.reached and not again.reached):
        return UNTOLD, f"{claimed.n} and {again.n} seeds are too few to tell ({100 * chance:.0f} % by chance): set more seeds"
    if claimed.updates is not None and again.updates is not None and again.updates > SLOWER * claimed.updates:
        return UNTOLD, f"the median seed needs {again.updates / claimed.updates:.1f} times the claimed updates"
    same = "as many seeds reach it, in as many updates"
    if claimed.seconds is None or again.seconds is None:
        return HOLDS, same
    if seen.differ.device:
        return HOLDS, f"{same}; the seconds are another device's"
    if again.seconds > SLOWER * claimed.seconds:
        return REFUTED, f"it takes more than {SLOWER:g} times the seconds"
    return HOLDS, f"{same}, within {SLOWER:g} times the seconds"


def used(
    key: str,
    kind: type[claims.Memory | claims.Energy],
    of: Callable[[Any], float | None],
    joined: Callable[[Sequence[float]], float],
    more: float,
) -> OfRuns:
    """The kind of a device's resource: `joined` over all runs; new runs may use `more` of it."""

    def made(runs: Sequence[Facts], metric: str | None, of_set: str | None) -> claims.Kind | None:
        found = [value for run in runs if (value := of(run))]
        return kind(rounded(joined(found)), len(found)) if found else None

    def judge(claimed: Any, again: Any, seen: ClaimRuns) -> tuple[str, str]:
        share = (of(again) or 0.0) / (of(claimed) or 1.0)
        return HOLDS if share <= 1 + more else REFUTED, f"{share:.2f} times the claim, {1 + more:g} allowed"

    return OfRuns(key, made, judge, needs_device=True)


ALL = (
    OfRuns("quality", final_metric, same_metric),
    OfRuns("target", time_to_target, as_soon),
    used("memory", claims.Memory, lambda run: run.peak_mib, max, MORE_MEMORY),
    used("energy", claims.Energy, lambda run: run.joules, statistics.fmean, MORE_ENERGY),
)


def chance_of_fewer(reached: int, n: int, claimed: int, of: int) -> float:
    """Fisher's exact test: the chance that so few of `n` new seeds reach a target, if they are like the `of` claimed ones."""
    good, bad = reached + claimed, n + of - reached - claimed
    ways = sum(math.comb(good, k) * math.comb(bad, n - k) for k in range(reached + 1))
    return ways / math.comb(n + of, n)


def rounded(value: float) -> float:
    """A figure with six digits; a whole number has no point."""
    found = float(f"{value:.6g}")
    return int(found) if found.is_integer() and abs(found) >= 10 else found


TOLERANCE, LOOSE = 0.05, 0.2  # the measured interval may end this far below the claimed one, and below the claimed ratio
HEADER = ("claim", "claimed", "measured here", "answer", "because")


@dataclass
class VerifySettings(compare.CompareSettings):
    """The settings of `drivetrain recipe verify`."""

    quick: bool = False  # only the speed


@dataclass
class Verified:
    """The result of verifying a recipe."""

    recipe: Recipe
    answers: list[Answer]
    job: Job
    comparison: compare.Comparison | None  # with the baseline, if a speed is claimed
    runs: list[Facts]  # trained here

    @property
    def code(self) -> int:
        """The exit code. 1: something fails. 0: nothing is refuted, and something holds. 4: nothing can be decided here."""
        outcomes = {answer.outcome for answer in self.answers}
        return FAILED if REFUTED in outcomes else DONE if HOLDS in outcomes else NOTHING_TOLD

    def as_dict(self) -> JsonObject:
        """The answers and the runs, for a file."""
        answers = [answer._asdict() for answer in self.answers]
        return {"recipe": self.recipe.name, "code": self.code, "answers": answers, "runs": [asdict(run) for run in self.runs]}


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain recipe verify`; return its exit code."""
    settings, given = verbs.split(argv, VerifySettings)
    if not given or ("=" in given[0] and not Path(given[0]).is_file() and not lookup.is_address(given[0])):
        raise UserError("drivetrain recipe verify wants the name or path of a recipe, then what else the run needs as key=value")
    recipe = lookup.read(given[0])
    if recipe.claim is not None:
        echo(f"claimed: {recipe.claim}")
    found = verify(recipe, given[1:], config_dirs, settings)
    if found.comparison is not None:
        compare.leave(found.comparison, found.job, argv, "recipe verify")
        echo()
    sheet.Table(HEADER, found.answers).show()
    return found.code


def verify(
    recipe: Recipe, overrides: Sequence[str] = (), config_dirs: Sequence[str] = (), settings: VerifySettings | None = None
) -> Verified:
    """Measure a recipe's claim again, and answer each kind of it. Raises UserError if it has none, or cannot be composed.

    It forks, so the calling process must not have used CUDA.
    """
    settings, claim, problems = settings or VerifySettings(), recipe.claim, []
    verbs.refuse_resume("recipe verify", overrides)
    if claim is None:
        raise UserError(
            f"{recipe.path}: nothing claimed: it has no `claim:`. `drivetrain recipe export` and `drivetrain compare` write one"
        )
    against = claim.speed.against if claim.speed is not None else {}
    if settings.quick and claim.speed is None:
        problems.append(f"{recipe.path} claims no speed, and quick=true measures nothing else: leave it out")
    if claim.speed is not None and settings.rounds < MIN_PAIRS:
        problems.append(f"rounds={settings.rounds}: with fewer than {MIN_PAIRS} rounds there is no interval")
    for word in overrides:
        if key_of(word) in against:
            problems.append(f"'{word}' is what the claim is about ({claims.as_overrides(against)}): leave it out")
        if "=" not in word or key_of(word) == "recipe":
            problems.append(f"'{word}': one recipe is verified at a time, and what follows it has the form key=value")
    refuse(problems)
    *base, spec = both_sides(recipe, claim.speed, overrides, config_dirs)
    job = variants.baseline_job([spec])
    asked = [kind for kind in ALL if kind.key in claim.kinds()]
    answers, compared, runs = [], None, []
    if claim.speed is not None:
        compared = compare.measure([*base, spec], settings, overrides)
        answers.append(judge(claim, compared.rows[0], compared.rows[1], job.run.runtime.device_type()))
        compared.notes.append(f"{answers[0].outcome}: {answers[0].because}")
    if settings.quick:
        answers += [Answer(kind.key, str(claim.kinds()[kind.key]), "–", SKIPPED, "--quick") for kind in asked]
    elif asked:
        given = any(key_of(word) == "runtime.seed" for word in overrides)
        first = job.run.runtime.seed if given else max(claim.seeds or (job.run.runtime.seed,)) + 1
        seeds = settings.seeds if claim.folds is None else math.ceil(settings.seeds / claim.folds)  # each on all folds
        seen = train(spec, claim, range(first, first + seeds), asked)
        answers, runs = [*answers, *(kind.answer(claim, seen) for kind in asked)], seen.runs
    return Verified(recipe, answers, job, compared, runs)


def both_sides(
    recipe: Recipe, speed: claims.Speed | None, overrides: Sequence[str], config_dirs: Sequence[str]
) -> list[VariantSpec]:
    """The baseline of a claim of speed, if there is one, and the unchanged recipe. Raises UserError with every problem."""
    given, specs, own_saving = [f"recipe={recipe.word}", *overrides], [], False
    if speed is not None:
        own_saving = any(key.split(".")[0] == "saving" for key in speed.against)
        base = variants.compose(
            claims.as_overrides(speed.against), given, config_dirs, recipe.baseline(options(config_dirs)), own_saving
        )
        base.overrides[1:1] = [f"{key}={format_value(value)}" for key, value in speed.against.items()]  # for compare.json
        specs.append(base)
    specs.append(variants.compose(recipe.name, given, config_dirs, recipe, own_saving))
    refuse(problem for spec in specs for problem in spec.problems)
    return specs


def train(spec: VariantSpec, claim: claims.Claim, seeds: Sequence[int], asked: Sequence[OfRuns]) -> ClaimRuns:
    """Train with these seeds; with the first alone if it fails, or shows that no asked figure can be decided here.

    Raises UserError where the run cannot be built, unless the cause may be a device other than the claim's.
    """
    job = variants.baseline_job([spec])
    reach, kind = Reach.parse(claim.target.reach) if claim.target is not None else None, job.run.runtime.device_type()
    seen = ClaimRuns([], Differences(), evaluated(job.run))
    with Steps() as progress, trainings("verify", job, reach, progress, sets_target=False) as run:
        for seed, fold in itertools.product(seeds, range(claim.folds) if claim.folds else (None,)):
            facts = run(spec, seed, claim.memory is not None and kind == "cpu" and not seen.runs, fold).facts
            assert facts is not None
            if not seen.runs:
                seen.differ = Differences.of(claim, facts.kind or kind, facts.device, facts.data)
                if facts.kind is None and facts.error is not None and not seen.differ.kind:
                    raise UserError(facts.error.removeprefix("failed: "))
            seen.runs.append(facts)
            if facts.error is not None or all(each.cannot_tell(seen.differ) for each in asked):
                break
    return seen


def judge(claim: claims.Claim, base: compare.Row, row: compare.Row, kind: str | None = None) -> Answer:
    """The answer on a claim of speed after measuring its variants on a device of this kind."""
    speed = claim.speed
    assert speed is not None
    differ = Differences.of(claim, row.device_type or kind, row.device)
    answer: Callable[[str, str], Answer] = lambda outcome, why: Answer(  # noqa: E731
        "speed", str(speed), str(row.ratio) if row.ratio else "–", outcome, why
    )
    for variant, name in ((base, "its baseline"), (row, "it")):
        if variant.error is not None:
            return answer(UNTOLD if differ.kind else REFUTED, f"{name} ended: {variant.error}")
    assert row.ratio is not None
    figures = f"measured {row.ratio}, claimed {claims.times(speed.ratio, *speed.interval)}"
    if row.verdict is not None:
        figures += f"; quality {row.verdict.outcome}"
        if row.verdict.outcome == quality.FAIL:
            return answer(REFUTED, f"{row.verdict.reason}: {figures}")
    elif speed.quality:
        figures += f"; quality {speed.quality} claimed: quality=true checks it again"
    if differ.hardware:
        faster = "" if row.ratio.low > 1 else "not faster here: "
        return answer(UNTOLD, f"{faster}other hardware ({differ.hardware}): {figures}")
    if speed.interval[0] > 1 >= row.ratio.low:
        return answer(REFUTED, f"not faster, the interval includes 1: {figures}")
    if row.ratio.high < (1 - TOLERANCE) * speed.interval[0]:
        return answer(REFUTED, f"slower than claimed: {figures}")
    if row.ratio.high < (1 - LOOSE) * speed.ratio:  # else a claim with a wide interval could have any ratio
        return answer(UNTOLD, f"the claimed interval is too wide to tell: {figures}")
    return answer(HOLDS, figures)

"""`drivetrain recipe verify`: measures again what a recipe claims, and answers by kind.

The speed is measured as `drivetrain compare` does, in turns with the claim's baseline. Everything else is measured by training
the recipe to its end with seeds that the claim did not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drivetrain.config.catalog import options
from drivetrain.core.errors import UserError
from drivetrain.core.overrides import format_value, key_of
from drivetrain.core.selection import evaluated
from drivetrain.core.target import Reach
from drivetrain.launch.job import Job
from drivetrain.measure import arguments
from drivetrain.measure.benchmark import arms, compare, comparison, noninferiority
from drivetrain.measure.benchmark.arms import ArmSpec, trainings
from drivetrain.measure.benchmark.comparison import Comparison
from drivetrain.measure.benchmark.facts import Facts
from drivetrain.measure.benchmark.row import Row
from drivetrain.measure.claims import kinds
from drivetrain.measure.claims.kinds import HOLDS, REFUTED, SKIPPED, UNTOLD, Answer, Differences, OfRuns, Seen
from drivetrain.measure.intervals import MIN_PAIRS
from drivetrain.recipe import places
from drivetrain.recipe.claim import Claim, Speed, as_overrides, times
from drivetrain.recipe.reader import Recipe
from drivetrain.ui.output import echo
from drivetrain.ui.progress import Steps
from drivetrain.ui.sheet import Table

TOLERANCE = 0.05  # the measured interval may end so far below the claimed one
HEADER = ("claim", "claimed", "measured here", "answer", "because")


@dataclass
class Settings(comparison.Settings):
    """The settings of `drivetrain recipe verify`."""

    quick: bool = False  # the speed alone


@dataclass
class Verified:
    """What verifying a recipe came to."""

    recipe: Recipe
    answers: list[Answer]
    job: Job
    comparison: Comparison | None  # with the baseline, where a speed is claimed
    runs: list[Facts]  # that were trained

    @property
    def code(self) -> int:
        """The exit code of the command."""
        return kinds.exit_code(self.answers)

    def as_dict(self) -> dict[str, Any]:
        """The answers and the runs, for a file."""
        answers = [answer._asdict() for answer in self.answers]
        return {"recipe": self.recipe.name, "code": self.code, "answers": answers, "runs": [asdict(run) for run in self.runs]}


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain recipe verify`; return its exit code."""
    settings, given = arguments.split(argv, Settings)
    if not given or ("=" in given[0] and not Path(given[0]).is_file() and not places.is_address(given[0])):
        raise UserError("drivetrain recipe verify wants the name or path of a recipe, then what else the run needs as key=value")
    recipe = places.read(given[0])
    if recipe.claim is not None:
        echo(f"claimed: {recipe.claim}")
    found = verify(recipe, given[1:], config_dirs, settings)
    if found.comparison is not None:
        compare.show(found.comparison)
        compare.save(found.comparison, found.job, argv, "recipe verify")
        echo()
    Table(HEADER, found.answers).show()
    return found.code


def verify(
    recipe: Recipe, overrides: Sequence[str] = (), config_dirs: Sequence[str] = (), settings: Settings | None = None
) -> Verified:
    """Measure a recipe's claim again, and answer each kind of it. Raises UserError where it has none, or cannot be composed.

    It forks, so the calling process must not have used CUDA.
    """
    settings, claim = settings or Settings(), recipe.claim
    arms.refuse_resume("recipe verify", overrides)
    if claim is None:
        raise UserError(
            f"{recipe.path}: nothing claimed: it has no `claim:`. `drivetrain recipe export` and `drivetrain compare` write one"
        )
    if settings.quick and claim.speed is None:
        raise UserError(f"{recipe.path} claims no speed, and quick=true measures nothing else: leave it out")
    _check(claim, overrides, settings)
    *base, spec = variants(recipe, claim.speed, overrides, config_dirs)
    job = arms.baseline_job([spec])
    asked = [kind for kind in kinds.ALL if getattr(claim, kind.key) is not None]
    answers, compared, runs = [], None, []
    if claim.speed is not None:
        compared = comparison.measure([*base, spec], settings, overrides)
        answers.append(judge(claim, compared.rows[0], compared.rows[1], job.run.runtime.device_type()))
        compared.notes.append(f"{answers[0].outcome}: {answers[0].because}")
    if settings.quick:
        answers += [Answer(kind.key, str(getattr(claim, kind.key)), "–", SKIPPED, "--quick") for kind in asked]
    elif asked:
        given = any(key_of(word) == "runtime.seed" for word in overrides)
        first = job.run.runtime.seed if given else max(claim.seeds or (job.run.runtime.seed,)) + 1
        runs = train(spec, claim, range(first, first + settings.seeds), asked)
        seen = Seen(runs, differences(claim, runs[0], job), evaluated(job.run))
        answers += [kind.answer(getattr(claim, kind.key), seen) for kind in asked]
    return Verified(recipe, answers, job, compared, runs)


def _check(claim: Claim, overrides: Sequence[str], settings: Settings) -> None:
    """Raise UserError for what cannot be given beside a recipe with this claim."""
    if claim.speed is not None and settings.rounds < MIN_PAIRS:
        raise UserError(f"rounds={settings.rounds}: with fewer than {MIN_PAIRS} rounds there is no interval to judge by")
    against = claim.speed.against if claim.speed is not None else {}
    if fixed := [override for override in overrides if key_of(override) in against]:
        raise UserError(f"'{o}' is what the claim is about ({as_overrides(against)}): leave it out" for o in fixed)
    if wrong := [override for override in overrides if "=" not in override or key_of(override) == "recipe"]:
        raise UserError(f"'{o}': one recipe is verified at a time, and what follows it has the form key=value" for o in wrong)


def variants(recipe: Recipe, speed: Speed | None, overrides: Sequence[str], config_dirs: Sequence[str]) -> list[ArmSpec]:
    """The baseline of a claim of speed, where there is one, and the recipe as it is. Raises UserError with every problem."""
    given, specs, own_saving = [f"recipe={recipe.word}", *overrides], [], False
    if speed is not None:
        own_saving = any(key.split(".")[0] == "saving" for key in speed.against)
        base = arms.compose(as_overrides(speed.against), given, config_dirs, recipe.baseline(options(config_dirs)), own_saving)
        base.overrides[1:1] = [f"{key}={format_value(value)}" for key, value in speed.against.items()]  # for compare.json
        specs.append(base)
    specs.append(arms.compose(recipe.name, given, config_dirs, recipe, own_saving))
    if problems := [problem for spec in specs for problem in spec.problems]:
        raise UserError(dict.fromkeys(problems))
    return specs


def train(spec: ArmSpec, claim: Claim, seeds: Sequence[int], asked: Sequence[OfRuns]) -> list[Facts]:
    """Train with these seeds; with the first alone where it fails, or shows that nothing of what is asked can be told here.

    Raises UserError where the run cannot be built.
    """
    job = arms.baseline_job([spec])
    reach = Reach.parse(claim.target.reach) if claim.target is not None else None
    memory = claim.memory is not None and job.run.runtime.device_type() == "cpu"
    runs: list[Facts] = []
    with Steps() as progress, trainings("verify", job, progress=progress) as run:
        for seed in seeds:
            runs.append(Facts.of(run(spec, seed, alone=memory and not runs), seed, reach))
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


def judge(claim: Claim, base: Row, row: Row, kind: str | None = None) -> Answer:
    """The answer on a claim of speed whose arms were measured again, on a device of this kind."""
    speed = claim.speed
    assert speed is not None
    differ = Differences.of(claim, row.device_type or kind, row.device)
    answer: Callable[[str, str], Answer] = lambda outcome, why: Answer(  # noqa: E731
        "speed", str(speed), str(row.ratio) if row.ratio else "–", outcome, why
    )
    for arm, name in ((base, "its baseline"), (row, "it")):
        if arm.error is not None:
            return answer(UNTOLD if differ.kind else REFUTED, f"{name} ended: {arm.error}")
    assert row.ratio is not None
    figures = f"measured {row.ratio}, claimed {times(speed.ratio, *speed.interval)}"
    if row.verdict is not None:
        figures += f"; quality {row.verdict.outcome}"
        if row.verdict.outcome == noninferiority.FAIL:
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
    return answer(HOLDS, figures)

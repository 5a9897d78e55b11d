"""`drivetrain recipe verify`: measures the claim of a recipe again on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drivetrain.config.catalog import options
from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.overrides import format_value, key_of
from drivetrain.measure import arguments
from drivetrain.measure.benchmark import arms, compare, comparison, noninferiority
from drivetrain.measure.benchmark.arms import ArmSpec
from drivetrain.measure.benchmark.comparison import Row, Settings
from drivetrain.measure.claims.write import Claim, as_overrides, describe, times
from drivetrain.measure.intervals import MIN_PAIRS
from drivetrain.recipe import places
from drivetrain.recipe.reader import Recipe
from drivetrain.recipe.safe_yaml import printable
from drivetrain.run import environment

TOLERANCE = 0.05  # the measured interval may end so far below the claimed one


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain recipe verify`; return its exit code."""
    settings, given = arguments.split(argv, Settings)
    arms.refuse_resume("recipe verify", given)
    if not given or ("=" in given[0] and not Path(given[0]).is_file() and not places.is_address(given[0])):
        raise UserError("drivetrain recipe verify wants the name or path of a recipe, then what else the run needs as key=value")
    if settings.rounds < MIN_PAIRS:
        raise UserError(f"rounds={settings.rounds}: with fewer than {MIN_PAIRS} rounds there is no interval to judge by")
    recipe = places.read(given[0])
    if recipe.claim is None:
        raise UserError(
            f"{recipe.path}: nothing claimed: it has no `claim:`. `drivetrain compare` and `drivetrain recipe diff` measure"
        )
    specs = baseline_and_recipe(recipe, recipe.claim, given[1:], config_dirs)
    print(f"claimed: {describe(recipe.claim)}")
    done = comparison.measure(specs, settings, given)
    code, conclusion = judge(recipe.claim, done.rows[0], done.rows[1])
    done.notes.append(conclusion)
    compare.show(done)
    compare.save(done, arms.baseline_job(specs), argv, "recipe verify")
    return code


def baseline_and_recipe(recipe: Recipe, claim: Claim, overrides: Sequence[str], config_dirs: Sequence[str]) -> list[ArmSpec]:
    """Two arms: the claim's baseline, and the recipe as it is. Raises UserError with every problem of either."""
    fixed = [override for override in overrides if key_of(override) in claim.against]
    if fixed:
        raise UserError(f"'{o}' is what the claim is about ({as_overrides(claim.against)}): leave it out" for o in fixed)
    if wrong := [override for override in overrides if "=" not in override or key_of(override) == "recipe"]:
        raise UserError(f"'{o}': one recipe is verified at a time, and what follows it has the form key=value" for o in wrong)
    own_saving = any(key.split(".")[0] == "saving" for key in claim.against)
    base = recipe.baseline(options(config_dirs))
    given = [f"recipe={recipe.word}", *overrides]
    specs = [
        arms.compose(as_overrides(claim.against), given, config_dirs, base, own_saving),
        arms.compose(recipe.name, given, config_dirs, recipe, own_saving),
    ]
    if problems := [problem for spec in specs for problem in spec.problems]:
        raise UserError(dict.fromkeys(problems))
    specs[0].overrides[1:1] = [f"{key}={format_value(value)}" for key, value in claim.against.items()]  # recorded in compare.json
    return specs


def judge(claim: Claim, base: Row, row: Row) -> tuple[int, str]:
    """The exit code, and the conclusion on a claim that was measured again."""
    for arm, name in ((base, "its baseline"), (row, "it")):
        if arm.error is not None:
            return FAILED, f"does not hold: {name} ended: {arm.error}"
    assert row.ratio is not None
    figures = f"measured {times(*row.ratio)}, claimed {times(claim.ratio, *claim.interval)}"
    if row.verdict is not None:
        figures += f"; quality {row.verdict.outcome}"
        if row.verdict.outcome == noninferiority.FAIL:
            return FAILED, f"does not hold: {row.verdict.reason}: {figures}"
    elif claim.quality:
        figures += f"; quality {claim.quality} claimed: quality=true checks it again"
    faster = row.ratio.low > 1
    if hardware := differences(claim, row):
        if faster:
            return DONE, f"holds here too, on other hardware ({hardware}): {figures}"
        return FAILED, f"other hardware ({hardware}): not faster here: {figures}"
    if not faster:
        return FAILED, f"does not hold: not faster, the interval includes 1: {figures}"
    if row.ratio.high < (1 - TOLERANCE) * claim.interval[0]:
        return FAILED, f"does not hold: faster, but by less than claimed: {figures}"
    return DONE, f"holds: {figures}"


def differences(claim: Claim, row: Row) -> str:
    """Where this machine differs from the claim's: in the device, or in a major version."""
    found = [f"{row.device}, claimed on {claim.device}"] if row.device != claim.device else []
    for name, claimed in claim.versions.items():
        here = environment.version(name)
        if here is not None and here.split(".")[0] != claimed.split(".")[0]:
            found.append(f"{name} {here}, claimed with {claimed}")
    return printable("; ".join(found))

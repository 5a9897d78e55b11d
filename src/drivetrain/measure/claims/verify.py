"""`drivetrain recipe verify`: the claim of a recipe, re-run on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drivetrain.config.catalog import options
from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.overrides import format_value, key_of
from drivetrain.measure import arguments
from drivetrain.measure.benchmark import compare, noninferiority
from drivetrain.measure.benchmark.compare import Entry, Row
from drivetrain.measure.claims.write import Claim, times, told, words
from drivetrain.measure.intervals import FEWEST
from drivetrain.recipe import reader as recipes
from drivetrain.recipe.reader import Recipe
from drivetrain.recipe.safe_yaml import printable
from drivetrain.run import environment

TOLERANCE = 0.05  # of the claim's lower bound: what is measured may stay so far below it


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """`drivetrain recipe verify`; its exit code."""
    asked, given = arguments.split(argv, compare.Settings)
    compare.afresh("recipe verify", given)
    if not given or ("=" in given[0] and not Path(given[0]).is_file()):
        raise UserError("drivetrain recipe verify wants the name or path of a recipe, then what else the run needs as key=value")
    if asked.rounds < FEWEST:
        raise UserError(f"rounds={asked.rounds}: below {FEWEST} rounds there is no interval, and nothing that could hold")
    recipe = recipes.read(recipes.find(given[0]))
    if recipe.claim is None:
        raise UserError(
            f"{recipe.path}: nothing claimed: it has no `claim:`. `drivetrain compare` and `drivetrain recipe diff` measure"
        )
    entries = arms(recipe, recipe.claim, given[1:], config_dirs)
    print(f"claimed: {told(recipe.claim)}")
    done = compare.measure(entries, asked, given)
    code, said = judge(recipe.claim, done.rows[0], done.rows[1])
    done.said.append(said)
    compare.show(done)
    folder = compare.save(done, compare.first_job(entries), argv, "recipe verify")
    print(f"written to {folder}/compare.json and compare.html")
    return code


def arms(recipe: Recipe, claim: Claim, given: Sequence[str], config_dirs: Sequence[str]) -> list[Entry]:
    """The baseline that the claim is against, and the recipe as it is. Raises UserError with what is wrong with either."""
    fixed = [word for word in given if key_of(word) in claim.against]
    if fixed:
        raise UserError(f"'{word}' is what the claim is about ({words(claim.against)}): leave it out" for word in fixed)
    if wrong := [word for word in given if "=" not in word or key_of(word) == "recipe"]:
        raise UserError(
            f"'{word}': one recipe is verified at a time, and what else is said has the form key=value" for word in wrong
        )
    own = () if any(key.split(".")[0] == "saving" for key in claim.against) else None
    base = recipe.baseline(options(config_dirs))
    name = f"recipe={recipe.path}"
    entries = [
        compare.entry(words(claim.against), [name, *given], config_dirs, own, base),
        compare.entry(recipe.name, [name, *given], config_dirs, own, recipe),
    ]
    if problems := [problem for entry in entries for problem in entry.problems]:
        raise UserError(dict.fromkeys(problems))
    entries[0].words[1:1] = [f"{key}={format_value(value)}" for key, value in claim.against.items()]  # for the record
    return entries


def judge(claim: Claim, base: Row, row: Row) -> tuple[int, str]:
    """The exit code, and what is said of a claim that was re-run."""
    for arm, called in ((base, "its baseline"), (row, "it")):
        if arm.error is not None:
            return FAILED, f"does not hold: {called} ended: {arm.error}"
    assert row.ratio is not None
    both = f"measured {times(*row.ratio)}, claimed {times(claim.ratio, *claim.interval)}"
    if row.verdict is not None:
        both += f"; quality {row.verdict.word}"
        if row.verdict.word == noninferiority.FAIL:
            return FAILED, f"does not hold: {row.verdict.reason}: {both}"
    elif claim.quality:
        both += f"; quality {claim.quality} claimed, which quality=true re-runs"
    faster = row.ratio.low > 1
    if elsewhere := differences(claim, row):
        if faster:
            return DONE, f"holds here too, on other hardware ({elsewhere}): {both}"
        return FAILED, f"other hardware ({elsewhere}): not faster here: {both}"
    if not faster:
        return FAILED, f"does not hold: not faster beyond doubt: {both}"
    if row.ratio.high < (1 - TOLERANCE) * claim.interval[0]:
        return FAILED, f"does not hold: faster, but by less than claimed: {both}"
    return DONE, f"holds: {both}"


def differences(claim: Claim, row: Row) -> str:
    """In what this machine is another one than the claim's: the device, a major version."""
    found = [f"{row.device}, claimed on {claim.device}"] if row.device != claim.device else []
    for name, claimed in claim.versions.items():
        here = environment.version(name)
        if here is not None and here.split(".")[0] != claimed.split(".")[0]:
            found.append(f"{name} {here}, claimed with {claimed}")
    return printable("; ".join(found))

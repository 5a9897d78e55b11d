"""Writes a measurement into a recipe: evidence as comments, and a claim as data that `recipe verify` measures again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.target import Reach
from drivetrain.launch.job import Job
from drivetrain.measure.benchmark.facts import Facts
from drivetrain.measure.benchmark.row import Row
from drivetrain.measure.claims import kinds
from drivetrain.measure.claims.kinds import Wanted
from drivetrain.recipe import own_code
from drivetrain.recipe.claim import Against, Claim, Data, Device, Speed
from drivetrain.recipe.safe_yaml import printable
from drivetrain.run import environment, recipe_file
from drivetrain.run.identity import flatten

SOFTWARE = ("torch", "drivetrain")  # whose versions a claim names
_ABSENT = object()


def against(job: Job, base: Job) -> dict[str, Any]:
    """The options and keys that turn the recipe of `job` into that of `base` again, as a claim holds them."""
    ours, theirs = (flatten(j.composed.unresolved) for j in (job, base))
    options = base.composed.choices
    found = {group: option for group, option in options.items() if job.composed.choice(group) != option}
    removed = {key.split(".")[0] for key in ours.keys() - theirs.keys()} & options.keys()
    found |= {group: options[group] for group in removed}  # only a group's option can remove a key
    shipped = flatten(base.composed.option_defaults)
    for key, value in theirs.items():
        before = shipped if key.split(".")[0] in found else ours
        if before.get(key, _ABSENT) != value and not key.endswith("_target_"):
            found[key] = value
    return found


def claim_of(row: Row, against: dict[str, Any]) -> Claim | None:
    """The claim of an arm that was compared to its baseline, and of the runs that were trained for its verdict.

    None where the ratio has no interval.
    """
    if row.ratio is None or not row.ratio.low or not against or row.device_type is None:
        return None
    middle, low, high = (round(value, 3) for value in row.ratio)
    verdict = row.verdict
    speed = Speed(middle, (low, high), Against(against), verdict.outcome if verdict else None)
    runs = [run.facts for run in verdict.runs if run.facts is not None] if verdict else []
    wanted = Wanted(verdict.metric if verdict else None, reach=Reach.parse(runs[0].reach or "") if runs else None)
    versions = {name: str(environment.version(name)) for name in SOFTWARE}
    return assembled(Device(row.device_type, str(row.device)), versions, time.strftime("%Y-%m-%d"), runs, wanted, speed)


def assembled(
    device: Device,
    versions: dict[str, str],
    measured: str | None,
    runs: Sequence[Facts],
    wanted: Wanted,
    speed: Speed | None = None,
) -> Claim:
    """A claim with all that these trainings measured, of several seeds or of one, beside what was found already."""
    found: dict[str, Any] = {"speed": speed, "device": device, "versions": versions, "measured": measured}
    if runs and not any(run.error for run in runs):
        found |= kinds.made_of(runs, wanted)
        found |= {"data": data_of(runs), "seeds": tuple(run.seed for run in runs)}
    return Claim(**found)


def data_of(runs: Sequence[Facts]) -> Data | None:
    """The fingerprint of the data that all runs have read; None where it is not the same, or there is none."""
    found = runs[0].data
    if found is None or any(run.data != found for run in runs) or not {"hash", "of", "samples"} <= found.keys():
        return None
    data = Data(found["hash"], found["of"], found["samples"])
    return None if any(data.problems("data")) else data


def own_groups(job: Job) -> set[str]:
    """The groups whose option is the user's own class, which no recipe may choose."""
    return {group for group, option in job.composed.choices.items() if own_code.is_own(group, option)}


def recipe_text(job: Job, against: dict[str, Any], row: Row, base_row: Row | None = None, comments: Sequence[str] = ()) -> str:
    """A recipe file of `job`, which `row` measured: comments, the recipe, and its claim.

    The recipe leaves out the user's own code and paths, and saving=none, which measuring sets. Where the baseline differs in
    those there can be no claim: a comment says so instead.
    """
    left_out = job.machine_local_keys | own_groups(job)
    if not job.run.saving.active and "saving" not in against:
        left_out = left_out | {"saving"}
    unclaimable = [key for key in against if key in left_out or key.split(".")[0] in left_out]
    claim = None if unclaimable else claim_of(row, against)
    lines = [*comments]
    if base_row is not None and row.samples_per_second and base_row.samples_per_second:
        lines.append(f"{row.samples_per_second:,.0f} samples a second, the baseline {base_row.samples_per_second:,.0f}")
    if unclaimable:
        lines.append(f"no claim: the baseline differs in {', '.join(unclaimable)}, which no recipe may set")
    section = claim.text() if claim is not None else ""
    return as_comments(lines) + recipe_file.to_recipe(job.composed, left_out, sections=section)


def of_the_run(row: Row, base: Row) -> list[str]:
    """What an arm is worth for the run as it is, in a line, and in another where kernels must be compiled first."""
    if row.run_s is None or base.run_s is None or row.run_updates is None:
        return []
    lines = [
        f"the run of {row.run_updates:,} updates takes {row.run_s:,.1f} s, start-up included, in place of {base.run_s:,.1f} s"
    ]
    if (uncompiled := row.first_pays_after) is not None:
        lines.append(f"it pays after {uncompiled:,} updates where its kernels are not compiled yet, as in a first run")
    return lines


def check_file(file: Path | None) -> None:
    """Raise UserError where a recipe cannot be written to this file, before anything is measured for it."""
    if file is None:
        return
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"{file}: a recipe's file ends in .yaml")
    if file.exists():
        raise UserError(f"{file} is there already: remove it or name another file")
    if not file.parent.is_dir():
        raise UserError(f"{file}: there is no folder {file.parent}")


def as_comments(lines: Sequence[str]) -> str:
    """The lines as YAML comments, with control characters and line breaks removed."""
    return "".join(f"# {printable(line)}\n" for line in lines)

"""Writes what was measured into recipes: evidence as comments, and a claim as data that `recipe verify` measures again."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.overrides import key_of
from drivetrain.core.target import Reach
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure.benchmark import ablate as ablating
from drivetrain.measure.benchmark import compare as comparing
from drivetrain.measure.benchmark import noninferiority
from drivetrain.measure.benchmark.arms import ArmSpec, baseline_job
from drivetrain.measure.benchmark.compare import HandOn
from drivetrain.measure.benchmark.comparison import Comparison
from drivetrain.measure.benchmark.facts import Facts
from drivetrain.measure.benchmark.row import Row
from drivetrain.measure.claims import kinds
from drivetrain.measure.claims.kinds import Wanted
from drivetrain.measure.overrides import apply
from drivetrain.recipe.claim import Against, Claim, Data, Device, Speed
from drivetrain.recipe.safe_yaml import names_code, printable
from drivetrain.run import environment, recipe_file
from drivetrain.run.identity import flatten
from drivetrain.ui.output import echo

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
    """The claim of a variant that was compared to its baseline, and of the runs that were trained for its verdict.

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


def _not_in_a_recipe(job: Job) -> set[str]:
    """The keys of a job that no recipe may hold, and the groups whose option is the user's own code."""
    return job.machine_local_keys | {group for group, option in job.composed.choices.items() if names_code(group, option)}


def recipe_text(job: Job, against: dict[str, Any], row: Row, base: Row, comments: Sequence[str] = ()) -> str:
    """A recipe file of `job`, which `row` measured: comments, the recipe, and its claim.

    The recipe leaves out the user's own code and paths, and saving=none, which measuring sets. Where the baseline differs in
    those there can be no claim: a comment says so instead.
    """
    left_out = _not_in_a_recipe(job)
    if not job.run.saving.active and "saving" not in against:
        left_out = left_out | {"saving"}
    unclaimable = [key for key in against if key in left_out or key.split(".")[0] in left_out]
    claim = None if unclaimable else claim_of(row, against)
    lines = [*comments]
    if row.samples_per_second and base.samples_per_second:
        lines.append(f"{row.samples_per_second:,.0f} samples a second, the baseline {base.samples_per_second:,.0f}")
    if unclaimable:
        lines.append(f"no claim: the baseline differs in {', '.join(unclaimable)}, which no recipe may set")
    section = claim.text() if claim is not None else ""
    return as_comments(lines) + recipe_file.to_recipe(job.composed, left_out, sections=section)


def of_the_run(row: Row, base: Row) -> list[str]:
    """What a variant is worth for the run as it is, in a line, and in another where kernels must be compiled first."""
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


def compare(overrides: list[str], config_dirs: Sequence[str] = (), recipe: Path | None = None) -> int:
    """Run `drivetrain compare`, which writes the file `recipe` if there is one; return its exit code."""
    return comparing.command(overrides, config_dirs, writer("compare", recipe))


def ablate(overrides: list[str], config_dirs: Sequence[str] = (), recipe: Path | None = None) -> int:
    """Run `drivetrain ablate`, which writes the file `recipe` if there is one; return its exit code."""
    return ablating.command(overrides, config_dirs, writer("ablate", recipe, last=True))


def writer(verb: str, file: Path | None, last: bool = False) -> HandOn | None:
    """What writes FILE of `--recipe FILE` when a verb has measured; None without one. Raises UserError where it cannot.

    It holds the fastest variant that is faster than the first beyond doubt and did not FAIL; with `last` it is the last one.
    """
    if file is None:
        return None
    check_file(file)

    def hand_on(done: Comparison, specs: Sequence[ArmSpec]) -> None:
        numbers = [len(specs) - 1] if last else range(1, len(specs))
        good = [n for n in numbers if _is_proven(done.rows[n]) and specs[n].job is not None]
        if not good:
            echo(
                f"{file} is not written: no variant is faster than the first beyond doubt, with a result as good. A better "
                "result alone is not handed on: `drivetrain recipe export` claims it from runs"
            )
            return
        number = max(good, key=lambda n: done.rows[n].gain or (0.0,))
        row, base = done.rows[number], done.rows[0]
        _write(file, verb, row.label or "it", base.label, baseline_job(specs[number:]), baseline_job(specs), row, base)
        echo(f"written to {file}; to check it on another machine: drivetrain recipe verify {file}")

    return hand_on


def _is_proven(row: Row) -> bool:
    """Whether a variant makes the run as it is faster beyond doubt, start-up included, and no worse as far as was seen."""
    return row.gain is not None and row.gain.low > 1 and (row.verdict is None or row.verdict.outcome != noninferiority.FAIL)


def _write(
    file: Path, verb: str, what: str, than: str, job: Job, before: Job, row: Row, base: Row, notes: Sequence[str] = ()
) -> None:
    """Write the recipe of a job that was measured to be faster than the one before."""
    assert row.ratio is not None
    evidence = f"drivetrain {verb}: {what} has {row.ratio} the samples a second of {than}, measured in interleaved rounds"
    comments = [evidence, *of_the_run(row, base), *notes]
    file.write_text(recipe_text(job, against(job, before), row, base, comments), encoding="utf-8")


def recommend(
    verb: str,
    overrides: Sequence[str],
    changes: Sequence[str],
    config_dirs: Sequence[str],
    base: Row,
    row: Row,
    folder: Path,
    notes: Sequence[str] = (),
    file: Path | None = None,
) -> list[str]:
    """Print the commands of a faster run, and write its recipe to `file`, or else to folder/recipe.yaml. Return the commands.

    `row` measured the run with `changes`, `base` the run without. The user's own code and paths, which no recipe may hold,
    stay overrides in the printed commands.
    """
    assert row.ratio is not None
    dirs = [argument for folder_ in config_dirs for argument in ("-cd", str(folder_))]
    changed = apply(overrides, changes, config_dirs)
    command = f"drivetrain train {shlex.join([*dirs, *changed])}"
    echo(f"\n{row.ratio.middle:.2f} × the samples a second{row.ratio.bounds}:\n  {command}")
    for line in of_the_run(row, base):
        echo(f"  {line}")
    if base.global_batch != row.global_batch:
        echo(
            f"  an update is the mean over {row.global_batch} samples now, not {base.global_batch}: check the learning rate "
            "(batch.lr_scaling, drivetrain tune what=lr) and the result (drivetrain compare … quality=true) again"
        )
    job, before = prepare_job(changed, config_dirs), prepare_job(overrides, config_dirs)
    recipe = file or folder / "recipe.yaml"
    _write(recipe, verb, " ".join(changes), "the run without", job, before, row, base, notes)
    local = _not_in_a_recipe(job) - {"recipe"}
    kept = [o for o in overrides if key_of(o).split(".")[0] in local or key_of(o) in local]
    by_recipe = f"drivetrain train {shlex.join([*dirs, f'recipe={recipe}', *kept])}"
    verify = f"drivetrain recipe verify {shlex.join([*dirs, str(recipe), *kept])}"
    echo(f"  {by_recipe}\nto check it on another machine:\n  {verify}")
    return [command, by_recipe, f"{verify}  # checks it on another machine"]

"""Recipes of what was measured: `drivetrain recipe export` of finished runs, and of the variants that a verb has compared.

Evidence stands in comments, and the claim is data that `recipe verify` measures again.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drivetrain.config.composed import flatten
from drivetrain.core.errors import DONE, FAILED, UserError, did_you_mean, printable, refuse
from drivetrain.core.options.overrides import key_of
from drivetrain.core.options.selection import REPEATS, Reach
from drivetrain.core.typed import JsonObject
from drivetrain.core.user.given import objects_in
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure import verbs
from drivetrain.measure.benchmark import compare as comparing
from drivetrain.measure.benchmark import programs, quality, variants
from drivetrain.measure.benchmark.compare import Comparison, Row
from drivetrain.measure.benchmark.variants import Facts, VariantSpec, baseline_job
from drivetrain.measure.changes import apply
from drivetrain.measure.claims import verify
from drivetrain.recipe import claims, sections
from drivetrain.recipe import reader as recipes
from drivetrain.recipe.safe_yaml import names_code
from drivetrain.recipe.write import with_section
from drivetrain.run import environment, reader, recipe_file
from drivetrain.run.reader import RunFiles, differing
from drivetrain.ui.output import echo
from drivetrain.ui.pages import run_table

SOFTWARE = ("torch", "drivetrain")  # whose versions a claim names
_ABSENT = object()


def against(job: Job, base: Job) -> JsonObject:
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


def claim_of(row: Row, against: dict[str, object]) -> claims.Claim | None:
    """The claim of a variant that was compared to its baseline, and of the runs that were trained for its verdict.

    None where the ratio has no interval.
    """
    if row.ratio is None or not row.ratio.low or not against or row.device_type is None:
        return None
    (middle, low, high), verdict = (round(value, 3) for value in row.ratio), row.verdict
    speed = claims.Speed(middle, (low, high), claims.Against(against), verdict.outcome if verdict else None)
    runs = [run.facts for run in verdict.runs if run.facts is not None] if verdict else []
    return claims.Claim(
        speed=speed,
        device=claims.DeviceSection(row.device_type, str(row.device)),
        versions={name: str(environment.version(name)) for name in SOFTWARE},
        measured=time.strftime("%Y-%m-%d"),
        **measured_by(runs, verdict.metric if verdict else None),
    )


def measured_by(runs: Sequence[Facts], metric: str | None, of_set: str | None = None) -> JsonObject:
    """The part of a claim that trainings of several seeds, or of one, have measured; nothing where one of them failed."""
    if not runs or any(run.error for run in runs):
        return {}
    found: JsonObject = {kind.key: kind.made(runs, metric, of_set) for kind in verify.ALL}
    read = runs[0].data or {}
    data = claims.DataSection(read.get("hash", ""), read.get("of", ""), read.get("samples", 0))
    if all(run.data == runs[0].data for run in runs if run.fold == runs[0].fold) and not any(data.problems("data")):
        found["data"] = data
    return {**found, "seeds": tuple(dict.fromkeys(run.seed for run in runs))}


def _not_in_a_recipe(job: Job) -> set[str]:
    """The keys of a job that no recipe may hold, and the groups whose option is the user's own code."""
    return job.machine_local_keys | {group for group, option in job.composed.choices.items() if names_code(group, option)}


def of_the_run(row: Row, base: Row) -> list[str]:
    """The gain of a variant for the run as it is, in a line, and in another where kernels must be compiled first."""
    if row.run_s is None or base.run_s is None or row.run_updates is None:
        return []
    lines = [
        f"the run of {row.run_updates:,} updates takes {row.run_s:,.1f} s, start-up included, instead of {base.run_s:,.1f} s"
    ]
    if (uncompiled := row.first_pays_after) is not None:
        lines.append(f"it pays after {uncompiled:,} updates where its kernels are not compiled yet, as in a first run")
    return lines


def as_comments(lines: Sequence[str]) -> str:
    """The lines as YAML comments, with control characters and line breaks removed."""
    return "".join(f"# {printable(line)}\n" for line in lines)


def compare(overrides: list[str], config_dirs: Sequence[str] = (), recipe: Path | None = None, *of_programs: object) -> int:
    """Run `drivetrain compare`, which writes the file `recipe` if there is one; return its exit code.

    With options `of_programs` it compares programs as they are, or revisions of code.
    """
    options = programs.Options(*of_programs)  # type: ignore[arg-type] # as argparse has read them
    if options.given:
        return programs.command(options, overrides, config_dirs)
    done, specs = comparing.run(overrides, config_dirs, recipe)
    if recipe is not None:
        hand_on("compare", recipe, done, specs, range(1, len(specs)))
    return FAILED if done.failed else DONE


def ablate(overrides: list[str], config_dirs: Sequence[str] = (), recipe: Path | None = None) -> int:
    """Run `drivetrain ablate`, which writes the last of the steps to the file `recipe`, if there is one; return its exit code."""
    comparisons, specs = comparing.ablate(overrides, config_dirs, recipe)
    if recipe is not None:
        hand_on("ablate", recipe, next(iter(comparisons.values())), specs, [len(specs) - 1])
    return FAILED if any(done.failed for done in comparisons.values()) else DONE


def hand_on(verb: str, file: Path, done: Comparison, specs: Sequence[VariantSpec], numbers: Sequence[int]) -> None:
    """Write the recipe of the fastest of these variants that is faster than the first beyond doubt, and did not FAIL.

    The whole run decides, start-up included.
    """
    good = {
        n: row.gain
        for n in numbers
        if (row := done.rows[n]).gain is not None and row.gain.low > 1 and specs[n].job is not None
        and (row.verdict is None or row.verdict.outcome != quality.FAIL)
    }  # fmt: skip
    if not good:
        echo(
            f"{file} is not written: no variant is faster than the first beyond doubt, with a result as good. A better "
            "result alone is not handed on: `drivetrain recipe export` claims it from runs"
        )
        return
    number = max(good, key=lambda n: good[n])
    row, base = done.rows[number], done.rows[0]
    write(file, verb, row.label or "it", base.label, baseline_job(specs[number:]), baseline_job(specs), row, base)
    echo(f"written to {file}; to check it on another machine: drivetrain recipe verify {file}")


def write(
    file: Path, verb: str, what: str, than: str, job: Job, before: Job, row: Row, base: Row, notes: Sequence[str] = ()
) -> None:
    """Write the recipe of a job, with its measurement against the job before: the evidence as comments, and its claim.

    The recipe leaves out the user's own code and paths, and saving=none, which measuring sets. Where the baseline differs in
    those there can be no claim: a comment says so instead.
    """
    instead, left_out = against(job, before), _not_in_a_recipe(job)
    if not job.run.saving.active and "saving" not in instead:
        left_out = left_out | {"saving"}
    lines = [f"drivetrain {verb}: {what} has {row.ratio} the samples a second of {than}, measured in interleaved rounds"]
    lines += [*of_the_run(row, base), *notes]
    if row.samples_per_second and base.samples_per_second:
        lines.append(f"{row.samples_per_second:,.0f} samples a second, the baseline {base.samples_per_second:,.0f}")
    if unclaimable := [key for key in instead if key in left_out or key.split(".")[0] in left_out]:
        lines.append(f"no claim: the baseline differs in {', '.join(unclaimable)}, which no recipe may set")
    claim = None if unclaimable else claim_of(row, instead)
    text = recipe_file.to_recipe(job.composed, left_out, sections=claim.text() if claim is not None else "")
    file.write_text(as_comments(lines) + text, encoding="utf-8")


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
    write(recipe, verb, " ".join(changes), "the run without", job, before, row, base, notes)
    local = _not_in_a_recipe(job) - {"recipe"}
    kept = [o for o in overrides if key_of(o).split(".")[0] in local or key_of(o) in local]
    by_recipe = f"drivetrain train {shlex.join([*dirs, f'recipe={recipe}', *kept])}"
    verify = f"drivetrain recipe verify {shlex.join([*dirs, str(recipe), *kept])}"
    echo(f"  {by_recipe}\nto check it on another machine:\n  {verify}")
    return [command, by_recipe, f"{verify}  # checks it on another machine"]


SEED = "runtime.seed"


@dataclass
class ExportSettings:
    """The settings of `drivetrain recipe export`."""

    target: str | float | None = None  # accuracy>=0.98, or a value of the metric that ranks the runs' models
    metric: str | None = None  # whose final value is claimed; null: the one that ranks the runs' models
    set: Literal["validation", "test"] | None = None  # null: the one that the runs are judged by


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain recipe export`; return its exit code."""
    settings, words = verbs.split(argv, ExportSettings)
    file = verbs.chosen() or (Path(words.pop()) if words and words[-1].endswith((".yaml", ".yml")) else None)
    if not words:
        raise UserError(
            "drivetrain recipe export needs a run's directory, or those of several seeds, and then the file to write (*.yaml) "
            "unless it is to be printed"
        )
    verbs.check_file(file)
    text = export([Path(word) for word in words], settings)
    if file is None:
        echo(text, end="")
        return DONE
    file.write_text(text, encoding="utf-8")
    run = reader.read(Path(words[0]))
    trust = flatten(run.environment).get("machine_local.trust")  # as far as it is one
    choices = recipes.read_of_run(run.path).choices
    own = recipe_file.code_words(choices, run.config, [*map(str, trust)] if isinstance(trust, list) else [])
    echo(f"written to {file}: run it by `drivetrain train {printable(shlex.join([f'recipe={file}', *own]))}`")
    return DONE


def export(run_dirs: Sequence[Path], settings: ExportSettings | None = None) -> str:
    """The recipe of these runs, which differ in their seed alone: its origin as comments, and a claim where they have measured.

    Raises UserError where they are no runs, one is given twice, they are not complete, or differ in more.
    """
    problems = [
        f"{folder} is no run's directory (no recipe.yaml in it): name one such as outputs/<date>/<time>-<id>"
        for folder in run_dirs
        if not (folder / "recipe.yaml").is_file()
    ]
    if len({folder.resolve() for folder in run_dirs}) < len(run_dirs):
        problems.append("a run's directory is given twice: name each once")
    refuse(problems)
    runs = sorted(map(reader.read, run_dirs), key=_repeat)
    refuse(
        f"{run.path} was made by a program, with its {' '.join(objects)}: put what that names into a module, and train with it"
        for run in runs
        if (objects := objects_in(run.result.overrides if run.result else []))
    )
    recipes.read_of_run(runs[0].path)
    asked = settings if settings is not None and settings != ExportSettings() else None
    has_claim = len(runs) > 1 or runs[0].status == "completed" or asked is not None  # a killed run leaves a recipe too
    claim = claim_of_runs(runs, asked or ExportSettings()) if has_claim else None
    text = with_section(recipes.raw_of_run(runs[0].path).decode(), claim.text() if claim is not None else "")
    return _origin(runs) + text


def _origin(runs: Sequence[RunFiles]) -> str:
    """Comment lines with the first run's name, device, versions, commit and result, and with the names of the others."""
    run, facts = runs[0], runs[0].environment
    first, *others = ("/".join(each.path.resolve().parts[-2:]) for each in runs)
    device = (run.result and run.result.device_name) or facts.get("processor")
    versions = [f"{name} {version}" for name, version in facts.get("versions", {}).items() if version]
    rate = run.result.samples_per_second if run.result is not None else None
    lines = [
        f"of the run {first}, drivetrain {facts.get('drivetrain', '–')}",
        f"on {device}, python {facts.get('python', '–')}" if device else "",
        ", ".join(versions),
        f"commit {commit}" if (commit := facts.get("git_commit")) else "",
        f"result: {run_table.verdict([run])}{f'; {rate:,.0f} samples/s' if rate else ''}",
        f"and of the same with other seeds or folds: {', '.join(others)}" if others else "",
    ]
    return as_comments([line for line in lines if line])


def claim_of_runs(runs: Sequence[RunFiles], settings: ExportSettings) -> claims.Claim | None:
    """The claim of runs of one config with different seeds; None where they measured nothing. Raises UserError."""
    (name, more), target = runs[0].metric or (None, True), settings.target
    by_number = f"{name or ''}{'>=' if more else '<='}{target}"  # of the metric that ranks the runs' models
    reach = Reach.parse(by_number) or Reach.parse(str(target)) if target is not None else None
    if target is not None and reach is None:
        raise UserError(f"target={sections.shown(target)}: give a metric and a value, as 'target=accuracy>=0.98'")
    found = [Facts.of(run, *_repeat(run), reach) for run in runs]
    refuse([*_refusals(runs, found)] or [*_without_figures(found, settings, reach)])
    device, date = claims.DeviceSection(found[0].kind or "", found[0].device or ""), None
    if any(device.problems("device")):
        return None
    with suppress(KeyError, ValueError, OverflowError, OSError):  # not recorded, or no time
        date = time.strftime("%Y-%m-%d", time.localtime(max(run.environment["time"] for run in runs)))
    measured = measured_by(found, settings.metric or name, settings.set)
    folds = _folds(runs)
    claim = claims.Claim(device=device, versions=_versions(runs[0]), measured=date, **measured, folds=folds)
    refuse(f"{runs[0].path}: {problem}" for problem in claim.problems("claim") if claim.kinds())
    return claim if claim.kinds() else None


def _repeat(run: RunFiles) -> tuple[int, int]:
    """The seed and the fold of a run. Raises UserError where its files do not say."""
    seed, fold = run.config.get(SEED), run.config.get("data.fold", 0)
    if not isinstance(seed, int) or sections.whole(seed) or not isinstance(fold, int):
        raise UserError(f"{run.path}: its config.yaml does not say {SEED}")
    return seed, fold


def _folds(runs: Sequence[RunFiles]) -> int | None:
    """The number of folds that several runs are of; None where they are none."""
    found = runs[0].config.get("data.folds")
    return found if isinstance(found, int) and len(runs) > 1 else None


def _versions(run: RunFiles) -> dict[str, str]:
    """The software that a run's files name."""
    known = {**run.environment.get("versions", {}), "drivetrain": run.environment.get("drivetrain")}
    return {name: version for name in SOFTWARE if (version := variants.text(known.get(name)))}


def _refusals(runs: Sequence[RunFiles], found: Sequence[Facts]) -> Iterator[str]:
    """Why there is no claim of all these runs: one has not completed, or they have more than the seed, or less, of their own."""

    def each(values: Iterable[object]) -> str:
        return printable(", ".join(dict.fromkeys(map(sections.shown, values))))

    if other := [key for key in differing(runs) if key not in REPEATS]:
        values = "; ".join(f"{key}: {each(run.config.get(key) for run in runs)}" for key in other)
        yield f"a claim over seeds is of one config, and these runs differ in {printable(values)}"
    places = [(fact.seed, fact.fold) for fact in found]
    folds = _folds(runs)
    if again := sorted({place for place in places if places.count(place) > 1}):
        of_fold = f" data.fold={again[0][1]}" if folds else ""
        yield f"several runs have {SEED}={again[0][0]}{of_fold}: give one run for each seed"
    elif folds and len(places) < (wanted := folds * len({seed for seed, _ in places})):
        yield f"data.folds={folds}: a claim is over all folds with each seed, {wanted} runs, and these are {len(places)}"
    failed = {run.path: fact.error for run, fact in zip(runs, found, strict=True) if fact.error is not None}
    for path, error in failed.items():
        yield f"{path}: {error}: a claim is over runs that have completed, and none may be left out"
    sides: dict[str, list[object]] = {
        "devices": [fact.device for fact in found],
        "versions": [str(_versions(run)) for run in runs],
        "training data": [(fact.data or {}).get("hash") for fact in found if fact.fold == found[0].fold],
    }
    for name, own in sides.items():
        if len(set(map(str, own))) > 1 and not failed:
            yield f"a claim is of one machine and one data set, and these runs had different {name}: {each(own)}"


def _without_figures(found: Sequence[Facts], settings: ExportSettings, reach: Reach | None) -> Iterator[str]:
    """Why a figure that was asked for cannot be claimed: the runs do not have it."""
    figures = found[0].figures.get(settings.set or found[0].set, {})
    if settings.set is not None and settings.set not in found[0].figures:
        yield f"set={settings.set}: these runs have not evaluated it: {did_you_mean(settings.set, found[0].figures)}"
    elif settings.metric is not None and settings.metric not in figures:
        yield f"metric={settings.metric}: these runs do not evaluate it: {did_you_mean(settings.metric, figures)}"
    every = {name for each in found for names in each.figures.values() for name in names}
    if reach is not None and reach.metric not in every:
        yield f"target={reach}: these runs do not evaluate it: {did_you_mean(reach.metric, every)}"

"""Recipes of what was measured: `drivetrain recipe export` of finished runs, and of the variants that a verb has compared.

Evidence stands in comments, and the claim is data that `recipe verify` measures again.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drivetrain.config.composed import flatten
from drivetrain.core.errors import DONE, FAILED, UserError, did_you_mean
from drivetrain.core.overrides import key_of
from drivetrain.core.selection import Reach
from drivetrain.core.typed import JsonObject
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure import verbs
from drivetrain.measure.benchmark import compare as comparing
from drivetrain.measure.benchmark import quality, variants
from drivetrain.measure.benchmark.compare import Comparison, Row
from drivetrain.measure.benchmark.variants import Facts, VariantSpec, baseline_job
from drivetrain.measure.changes import apply
from drivetrain.measure.claims import verify
from drivetrain.measure.claims.verify import Wanted
from drivetrain.recipe import reader as recipes
from drivetrain.recipe import sections
from drivetrain.recipe.claim import Against, Claim, Data, Device, Speed
from drivetrain.recipe.safe_yaml import names_code, printable
from drivetrain.recipe.write import with_section
from drivetrain.run import environment, reader, recipe_file
from drivetrain.run.reader import RunFiles, differing
from drivetrain.ui.output import echo
from drivetrain.ui.pages import run as run_page

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


def claim_of(row: Row, against: dict[str, object]) -> Claim | None:
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
    found: JsonObject = {"speed": speed, "device": device, "versions": versions, "measured": measured}
    if runs and not any(run.error for run in runs):
        found |= verify.made_of(runs, wanted)
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


def recipe_text(job: Job, against: dict[str, object], row: Row, base: Row, comments: Sequence[str] = ()) -> str:
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
    """The gain of a variant for the run as it is, in a line, and in another where kernels must be compiled first."""
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
    check_file(recipe)
    done, specs = comparing.run(overrides, config_dirs)
    if recipe is not None:
        hand_on("compare", recipe, done, specs, range(1, len(specs)))
    return FAILED if done.failed else DONE


def ablate(overrides: list[str], config_dirs: Sequence[str] = (), recipe: Path | None = None) -> int:
    """Run `drivetrain ablate`, which writes the last of the steps to the file `recipe`, if there is one; return its exit code."""
    check_file(recipe)
    comparisons, specs = comparing.ablate(overrides, config_dirs, needs_steps=recipe is not None)
    if recipe is not None:
        hand_on("ablate", recipe, next(iter(comparisons.values())), specs, [len(specs) - 1])
    return FAILED if any(done.failed for done in comparisons.values()) else DONE


def hand_on(verb: str, file: Path, done: Comparison, specs: Sequence[VariantSpec], numbers: Sequence[int]) -> None:
    """Write the recipe of the fastest of these variants that is faster than the first beyond doubt, and did not FAIL."""
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


def _is_proven(row: Row) -> bool:
    """True if a variant makes the run as it is faster beyond doubt, start-up included, and no worse as far as was seen."""
    return row.gain is not None and row.gain.low > 1 and (row.verdict is None or row.verdict.outcome != quality.FAIL)


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


SEED = "runtime.seed"


@dataclass
class Settings:
    """The settings of `drivetrain recipe export`."""

    target: str | float | None = None  # accuracy>=0.98, or a value of the metric that ranks the runs' models
    metric: str | None = None  # whose final value is claimed; null: the one that ranks the runs' models
    set: Literal["validation", "test"] | None = None  # null: the one that the runs are judged by


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain recipe export`; return its exit code."""
    settings, words = verbs.split(argv, Settings)
    file = Path(words.pop()) if words and words[-1].endswith((".yaml", ".yml")) else None
    if not words:
        raise UserError(
            "drivetrain recipe export needs a run's directory, or those of several seeds, and then the file to write (*.yaml) "
            "unless it is to be printed"
        )
    check_file(file)
    text = export([Path(word) for word in words], settings)
    if file is None:
        echo(text, end="")
        return DONE
    file.write_text(text, encoding="utf-8")
    echo(f"written to {file}: {_next(file, read_runs([Path(words[0])])[0])}")
    return DONE


def export(run_dirs: Sequence[Path], settings: Settings | None = None) -> str:
    """The recipe of these runs, which differ in their seed alone: its origin as comments, and a claim where they have measured.

    Raises UserError where they are no runs, are not complete, or differ in more.
    """
    runs = read_runs(run_dirs)
    runs.sort(key=_seed)
    recipes.read_of_run(runs[0].path)
    asked = settings if settings is not None and settings != Settings() else None
    has_claim = len(runs) > 1 or runs[0].status == "completed" or asked is not None  # a killed run leaves a recipe too
    claim = claim_of_runs(runs, asked or Settings()) if has_claim else None
    text = with_section(recipes.raw_of_run(runs[0].path).decode(), claim.text() if claim is not None else "")
    return _origin(runs) + text


def _origin(runs: Sequence[RunFiles]) -> str:
    """Comment lines with the first run's name, device, versions, commit and result, and with the names of the others."""
    (run, *others), facts = runs, runs[0].environment
    device = (run.result and run.result.device_name) or facts.get("processor")
    versions = [f"{name} {version}" for name, version in facts.get("versions", {}).items() if version]
    rate = run.result.samples_per_second if run.result is not None else None
    lines = [
        f"of the run {_name(run)}, drivetrain {facts.get('drivetrain', '–')}",
        f"on {device}, python {facts.get('python', '–')}" if device else "",
        ", ".join(versions),
        f"commit {commit}" if (commit := facts.get("git_commit")) else "",
        f"result: {run_page.verdict(run)}{f'; {rate:,.0f} samples/s' if rate else ''}",
        f"and of the same with other seeds: {', '.join(map(_name, others))}" if others else "",
    ]
    return as_comments([line for line in lines if line])


def _name(run: RunFiles) -> str:
    return "/".join(run.path.resolve().parts[-2:])


def _next(file: Path, run: RunFiles) -> str:
    """The command that runs the recipe of a run."""
    choices, trust = recipes.read_of_run(run.path).choices, _trusted(run)
    words = [f"recipe={file}", *recipe_file.code_words(choices, run.config, trust)]
    return f"run it by `drivetrain train {printable(shlex.join(words))}`"


def _trusted(run: RunFiles) -> list[str]:
    """The words of `trust` that a run recorded."""
    local = run.environment.get("machine_local")
    trust = local.get("trust") if isinstance(local, dict) else None
    return [str(word) for word in trust] if isinstance(trust, list) else []


def read_runs(run_dirs: Sequence[Path]) -> list[RunFiles]:
    """The files of runs. Raises UserError for each directory that is none, and for one that is given twice."""
    problems = [
        f"{folder} is no run's directory (no recipe.yaml in it): name one such as outputs/<date>/<time>-<id>"
        for folder in run_dirs
        if not (folder / "recipe.yaml").is_file()
    ]
    if len({folder.resolve() for folder in run_dirs}) < len(run_dirs):
        problems.append("a run's directory is given twice: name each once")
    if problems:
        raise UserError(problems)
    return [reader.read(folder) for folder in run_dirs]


def claim_of_runs(runs: Sequence[RunFiles], settings: Settings) -> Claim | None:
    """The claim of runs of one config with different seeds; None where they measured nothing. Raises UserError."""
    _check_same(runs)
    wanted = _wanted(runs[0], settings)
    found = [Facts.of(run, _seed(run), wanted.reach) for run in runs]
    if failed := [f"{run.path}: {fact.error}" for run, fact in zip(runs, found, strict=True) if fact.error is not None]:
        raise UserError([f"{text}: a claim is over runs that have completed, and none may be left out" for text in failed])
    _check_figures(found, wanted, settings)
    _check_alike(runs, found)
    first = found[0]
    device = Device(first.kind or "", first.device or "")
    if any(device.problems("device")):
        return None
    claim = assembled(device, _versions(runs[0]), _date(runs), found, wanted)
    if not claim.kinds():
        return None
    if wrong := list(claim.problems("claim")):
        raise UserError([f"{runs[0].path}: {problem}" for problem in wrong])
    return claim


def _seed(run: RunFiles) -> int:
    """The seed of a run. Raises UserError where its files do not say."""
    seed = run.config.get(SEED)
    if not isinstance(seed, int) or sections.whole(seed):
        raise UserError(f"{run.path}: its config.yaml does not say {SEED}")
    return seed


def _check_same(runs: Sequence[RunFiles]) -> None:
    """Raise UserError where the runs' configs differ in more than the seed, or in less."""
    if other := [key for key in differing(runs) if key != SEED]:
        values = "; ".join(f"{key}: {_each(run.config.get(key) for run in runs)}" for key in other)
        raise UserError(f"a claim over seeds is of one config, and these runs differ in {printable(values)}")
    seeds = [_seed(run) for run in runs]
    if again := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        raise UserError(f"several runs have {SEED}={again[0]}: give one run for each seed")


def _each(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(map(sections.shown, values)))


def _wanted(run: RunFiles, settings: Settings) -> Wanted:
    """The figures to claim of runs like this one. Raises UserError for a target that is none."""
    (name, more), given = run.metric or (None, True), settings.target
    if given is None:
        return Wanted(settings.metric or name, settings.set)
    try:
        value = variants.number(float(given))
    except ValueError:
        value = None
    reach = Reach(name, more, value) if name is not None and value is not None else Reach.parse(str(given))
    if reach is None:
        raise UserError(f"target={sections.shown(given)}: give a metric and a value, as 'target=accuracy>=0.98'")
    return Wanted(settings.metric or name, settings.set, reach)


def _check_figures(found: Sequence[Facts], wanted: Wanted, settings: Settings) -> None:
    """Raise UserError where a figure was asked for that the runs do not have."""
    figures = found[0].figures.get(wanted.set or found[0].set, {})
    if settings.set is not None and settings.set not in found[0].figures:
        raise UserError(f"set={settings.set}: these runs have not evaluated it: {did_you_mean(settings.set, found[0].figures)}")
    every = {name for each in found for names in each.figures.values() for name in names}
    reached = wanted.reach and wanted.reach.metric
    for word, name, known in (("metric", settings.metric, figures), ("target", reached, every)):
        if name is not None and name not in known:
            given = wanted.reach if word == "target" else name
            raise UserError(f"{word}={given}: these runs do not evaluate it: {did_you_mean(name, known)}")


def _check_alike(runs: Sequence[RunFiles], found: Sequence[Facts]) -> None:
    """Raise UserError where the runs had different devices, software or data: a claim names one of each."""
    sides: dict[str, list[object]] = {
        "devices": [fact.device for fact in found],
        "versions": [str(_versions(run)) for run in runs],
        "training data": [(fact.data or {}).get("hash") for fact in found],
    }
    if other := {name: values for name, values in sides.items() if len(set(map(str, values))) > 1}:
        raise UserError(
            f"a claim is of one machine and one data set, and these runs had different {name}: {_each(values)}"
            for name, values in other.items()
        )


def _versions(run: RunFiles) -> dict[str, str]:
    """The software that a run's files name."""
    known = {**run.environment.get("versions", {}), "drivetrain": run.environment.get("drivetrain")}
    return {name: version for name in SOFTWARE if (version := variants.text(known.get(name)))}


def _date(runs: Sequence[RunFiles]) -> str | None:
    """The date of the newest run."""
    try:
        return time.strftime("%Y-%m-%d", time.localtime(max(run.environment["time"] for run in runs)))
    except (KeyError, ValueError, OverflowError, OSError):  # not recorded, or no time
        return None

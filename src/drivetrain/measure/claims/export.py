"""`drivetrain recipe export`: the recipe of a run, or of several seeds' runs, with where it comes from and what they measured."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from drivetrain.core.errors import DONE, UserError, did_you_mean
from drivetrain.core.target import Reach
from drivetrain.measure import arguments
from drivetrain.measure.benchmark import facts
from drivetrain.measure.benchmark.facts import Facts
from drivetrain.measure.claims.kinds import Wanted
from drivetrain.measure.claims.write import SOFTWARE, as_comments, assembled, check_file
from drivetrain.recipe import reader as recipes
from drivetrain.recipe import sections
from drivetrain.recipe import write as recipe_text
from drivetrain.recipe.claim import Claim, Device
from drivetrain.recipe.safe_yaml import printable
from drivetrain.run import reader, recipe_file
from drivetrain.run.reader import RunFiles, differing
from drivetrain.ui.output import echo

SEED = "runtime.seed"


@dataclass
class Settings:
    """The settings of `drivetrain recipe export`."""

    target: str | float | None = None  # accuracy>=0.98, or a value of the metric that ranks the runs' models
    metric: str | None = None  # whose final value is claimed; null: the one that ranks the runs' models
    set: Literal["validation", "test"] | None = None  # null: the one that the runs are judged by


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain recipe export`; return its exit code."""
    settings, words = arguments.split(argv, Settings)
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
    text = recipe_text.with_section(recipes.raw_of_run(runs[0].path).decode(), claim.text() if claim is not None else "")
    return _origin(runs) + text


def _origin(runs: Sequence[RunFiles]) -> str:
    """Comment lines with the first run's name, device, versions, commit and result, and with the names of the others."""
    (run, *others), facts = runs, runs[0].environment
    device = (run.result and run.result.device_name) or facts.get("processor")
    versions = [f"{name} {version}" for name, version in facts.get("versions", {}).items() if version]
    lines = [
        f"of the run {_name(run)}, drivetrain {facts.get('drivetrain', '–')}",
        f"on {device}, python {facts.get('python', '–')}" if device else "",
        ", ".join(versions),
        f"commit {commit}" if (commit := facts.get("git_commit")) else "",
        f"result: {', '.join(_figures(run))}",
        f"and of the same with other seeds: {', '.join(map(_name, others))}" if others else "",
    ]
    return as_comments([line for line in lines if line])


def _name(run: RunFiles) -> str:
    return "/".join(run.path.resolve().parts[-2:])


def _figures(run: RunFiles) -> list[str]:
    """The run's results, each figure with its name."""
    figures, final, best = [run.status], run.final(), run.best()
    if run.metric is not None and final is not None:
        figures.append(f"{run.metric[0]} {final:.4f}" + (f" (best {best:.4f})" if best is not None else ""))
    if run.result is not None:
        rate = run.result.samples_per_second
        figures += [f"{rate:,.0f} samples/s"] if rate else []
        figures.append(f"{run.result.updates:,} updates in {run.result.wall_s:.1f} s")
    return figures


def _next(file: Path, run: RunFiles) -> str:
    """How the recipe of a run is run."""
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
    """What runs of one config with different seeds measured; None where that is nothing. Raises UserError."""
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


def _each(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(map(sections.shown, values)))


def _wanted(run: RunFiles, settings: Settings) -> Wanted:
    """What is to be claimed of runs like this one. Raises UserError for a target that is none."""
    (name, more), given = run.metric or (None, True), settings.target
    if given is None:
        return Wanted(settings.metric or name, settings.set)
    try:
        value = facts.number(float(given))
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
    sides: dict[str, list[Any]] = {
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
    return {name: version for name in SOFTWARE if (version := facts.text(known.get(name)))}


def _date(runs: Sequence[RunFiles]) -> str | None:
    """The date of the newest run."""
    try:
        return time.strftime("%Y-%m-%d", time.localtime(max(run.environment["time"] for run in runs)))
    except (KeyError, ValueError, OverflowError, OSError):  # not recorded, or no time
        return None

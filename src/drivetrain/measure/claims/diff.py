"""`drivetrain recipe diff`: where two recipes or runs differ, the results of each, and what the difference is worth."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.overrides import key_of
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure import arguments, cells
from drivetrain.measure.benchmark import arms, compare, comparison
from drivetrain.measure.benchmark.arms import ArmSpec
from drivetrain.measure.claims import handed
from drivetrain.recipe import places
from drivetrain.recipe import reader as recipes
from drivetrain.recipe.claim import times
from drivetrain.recipe.reader import Recipe
from drivetrain.recipe.safe_yaml import printable
from drivetrain.run import reader
from drivetrain.run.reader import Points, RunFiles, compared, differing
from drivetrain.ui import terminal
from drivetrain.ui.output import echo


@dataclass
class Settings(comparison.Settings):
    """The settings of `drivetrain recipe diff`."""

    measure: bool = False  # run an interleaved benchmark of the two


@dataclass
class Side:
    """One of the two: a recipe, or a run's directory with the recipe that it wrote."""

    name: str  # as given on the command line
    recipe: Recipe | None
    run: RunFiles  # of a recipe: its config alone


def command(argv: list[str], config_dirs: Sequence[str] = (), recipe: Path | None = None) -> int:
    """Run `drivetrain recipe diff`; return its exit code. The second side is handed on to the file `recipe`, if there is one."""
    settings, rest = arguments.split(argv, Settings)
    if recipe is not None and not settings.measure:
        raise UserError(f"--recipe {recipe} is for what was measured: say measure=true too")
    hand_on = handed.writer("recipe diff", recipe)
    arms.refuse_resume("recipe diff", rest)
    names = [argument for argument in rest if "=" not in argument or places.is_address(argument) or Path(argument).exists()]
    overrides = [argument for argument in rest if argument not in names]
    if len(names) != 2:
        raise UserError(
            f"drivetrain recipe diff wants two, each a recipe's name or path or a run's directory: given {len(names)}"
        )
    if any(key_of(override) == "recipe" for override in overrides):
        raise UserError("drivetrain recipe diff takes recipes by their names alone: leave recipe= out")
    sides = _read(names, overrides, config_dirs)
    _show(sides)
    for side in sides:
        if side.recipe is not None and side.recipe.claim is not None:
            echo(f"{side.name} claims {side.recipe.claim}")
    if settings.measure:
        return _measure(sides, overrides, config_dirs, settings, argv, hand_on)
    dirs = [argument for folder in config_dirs for argument in ("-cd", str(folder))]
    echo(f"to measure the difference: drivetrain recipe diff {shlex.join([*dirs, *names, *overrides, 'measure=true'])}")
    return DONE


def _read(names: Sequence[str], overrides: Sequence[str], config_dirs: Sequence[str]) -> list[Side]:
    """Read both sides. Raises UserError with every problem of either."""
    sides, problems = [], []
    for name in names:
        try:
            sides.append(_read_run(name) if Path(name).is_dir() else _read_recipe(name, overrides, config_dirs))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(dict.fromkeys(problems))
    return sides


def _read_run(name: str) -> Side:
    """A run from the files in its directory."""
    path = Path(name)
    if not (path / "config.yaml").is_file():
        raise UserError(f"{name} is no run's directory (no config.yaml in it): name one such as outputs/<date>/<time>-<id>")
    return Side(name, recipes.read_of_run(path) if (path / "recipe.yaml").is_file() else None, reader.read(path))


def _read_recipe(name: str, overrides: Sequence[str], config_dirs: Sequence[str]) -> Side:
    """A recipe's config with these overrides."""
    recipe = places.read(name)
    composed = prepare_job(overrides, config_dirs, recipe).composed
    config: dict[str, Any] = yaml.safe_load(OmegaConf.to_yaml(composed.config))  # as in a run's config.yaml
    chosen = {group: option for group, option in composed.choices.items() if group != "logger"}  # as in a run's recipe.yaml
    files = RunFiles(recipe.path, name, None, "", compared(config, chosen), {}, Points(), Points())
    return Side(name, recipe, files)


def _show(sides: Sequence[Side]) -> None:
    """Print where the configs differ, and the results of those sides that are runs."""
    both = [side.run for side in sides]
    keys = differing(both)
    groups = [key.split(".")[0] for key in keys]
    keys.sort(key=lambda key: (groups.index(key.split(".")[0]), "." in key))  # a group's option before its keys
    rows = [(key, *(printable(_setting(run.config.get(key))) for run in both)) for key in keys]
    header = ("", *(side.name for side in sides))
    if rows:
        terminal.table(header, rows)
    else:
        echo("the configs are the same")
    if any(run.result is not None for run in both):
        echo()
        terminal.table(header, _results(both))


def _setting(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else cells.setting(value)


def _results(both: Sequence[RunFiles]) -> list[tuple[str, ...]]:
    """The runs' results: a row for each figure that one of them has, and for each version in which they differ."""

    def row(name: str, form: str, value: Any) -> tuple[str, ...]:
        return (name, *(cells.figure(value(run), form) for run in both))

    def result(attribute: str, factor: float = 1.0) -> Any:
        def value(run: RunFiles) -> float | None:
            found = getattr(run.result, attribute, None)
            return None if found is None else factor * found

        return value

    metric = next((run.metric[0] for run in both if run.metric), "metric")
    rows = [
        row("status", "{}", lambda run: run.status or None),
        row(metric, "{:.4f}", RunFiles.final),
        row(f"best {metric}", "{:.4f}", RunFiles.best),
        row("samples/s", "{:,.0f}", result("samples_per_second")),
        row("step p50", "{:.2f} ms", result("step_ms_p50")),
        row("memory", "{:.2f} GiB", result("peak_memory_bytes", 2**-30)),
        row("wall", "{:.1f} s", result("wall_s")),
        row("device", "{}", lambda run: run.result and (run.result.device_name or run.result.device)),
    ]
    versions = [{**(run.environment.get("versions") or {}), "commit": run.environment.get("git_commit")} for run in both]
    for name in dict.fromkeys(name for found in versions for name in found):
        if len({found.get(name) for found in versions if len(found) > 1}) > 1:
            rows.append((name, *(str(found.get(name) or "–") for found in versions)))
    return [tuple(map(printable, texts)) for texts in rows if set(texts[1:]) != {"–"}]


def _measure(
    sides: Sequence[Side],
    overrides: Sequence[str],
    config_dirs: Sequence[str],
    settings: Settings,
    argv: list[str],
    hand_on: handed.HandOn | None,
) -> int:
    """Benchmark both, the first as the baseline; return the exit code."""
    specs = [_arm(side, overrides, config_dirs) for side in sides]
    if problems := [problem for spec in specs for problem in spec.problems]:
        raise UserError(dict.fromkeys(problems))
    done = comparison.measure(specs, settings, overrides)
    ratio = done.rows[1].ratio
    if ratio is not None and ratio.low:
        conclusion = "" if ratio.differs else ": no difference" if ratio.same else ": not distinguishable"
        done.notes.append(f"{sides[1].name} has {times(*ratio)} the samples a second of {sides[0].name}{conclusion}")
    echo()
    compare.show(done)
    compare.save(done, arms.baseline_job(specs), argv, "recipe diff")
    if hand_on is not None:
        hand_on(done, specs)
    return FAILED if done.failed else DONE


def _arm(side: Side, overrides: Sequence[str], config_dirs: Sequence[str]) -> ArmSpec:
    """A side as an arm of the benchmark.

    A run's own code is never taken from its files: the overrides must name it, else this is a problem of the arm.
    """
    if side.recipe is None:
        return ArmSpec(side.name, [*overrides], None, [f"{side.name} has no recipe.yaml: it cannot be measured"])
    recipe = side.recipe
    own = {group for group, option in recipe.choices.items() if option == "own"}
    named = {key_of(override) for override in overrides}
    if Path(side.name).is_dir():
        if missing := sorted(own - named):
            wanted = ", ".join(f"{group}=own {group}.target=…" for group in missing)
            problem = f"{side.name} ran code of its own: give {wanted} and trust=[…] too"
            return ArmSpec(side.name, [*overrides], None, [problem])
        recipe = replace(recipe, choices={g: o for g, o in recipe.choices.items() if g not in own})
    return arms.compose(side.name, [f"recipe={recipe.word}", *overrides], config_dirs, recipe)

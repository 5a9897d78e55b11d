"""`drivetrain recipe diff`: the differences between two recipes or runs, and the results of each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from drivetrain.core.errors import DONE, UserError, collecting, printable, refuse
from drivetrain.core.options.overrides import key_of
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure import verbs
from drivetrain.recipe import claims, lookup
from drivetrain.recipe import reader as recipes
from drivetrain.run import reader
from drivetrain.run.reader import Points, RunFiles, compared, differing
from drivetrain.ui import sheet
from drivetrain.ui.output import echo
from drivetrain.ui.pages import run_table

NOT_SHOWN = ("run", "folder", "updates made", "error")  # of the report's table


def command(argv: Sequence[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain recipe diff`; return its exit code."""
    verbs.refuse_resume("recipe diff", argv)
    names = [argument for argument in argv if "=" not in argument or lookup.is_address(argument) or Path(argument).exists()]
    overrides = [argument for argument in argv if argument not in names]
    if len(names) != 2:
        raise UserError(
            f"drivetrain recipe diff wants two, each a recipe's name or path or a run's directory: given {len(names)}"
        )
    if any(key_of(override) == "recipe" for override in overrides):
        raise UserError("drivetrain recipe diff takes recipes by their names alone: leave recipe= out")
    sides, problems = [], list[str]()
    for name in names:
        with collecting(problems):
            sides.append(_read(name, overrides, config_dirs))
    refuse(problems)
    both = [run for run, _ in sides]
    if not differing(both):
        echo("the configs are the same")
    if differing(both) or any(run.result for run in both):
        sheet.Table(("", *names), _rows(both)).show()
    for name, (_, claim) in zip(names, sides, strict=True):
        if claim is not None:
            echo(f"{name} claims {claim}")
    dirs = [argument for folder in config_dirs for argument in ("-cd", str(folder))]
    recipes_of = ",".join(f"{name}/recipe.yaml" if Path(name).is_dir() else name for name in names)
    echo(f"to measure the difference: drivetrain compare {shlex.join([*dirs, f'recipe={recipes_of}', *overrides])}")
    return DONE


def _read(name: str, overrides: Sequence[str], config_dirs: Sequence[str]) -> tuple[RunFiles, claims.Claim | None]:
    """The files of a run, or a recipe's config with these overrides in the same form; and the recipe's claim."""
    if (path := Path(name)).is_dir():
        if not (path / "config.yaml").is_file():
            raise UserError(f"{name} is no run's directory (no config.yaml in it): name one such as outputs/<date>/<time>-<id>")
        return reader.read(path), recipes.read_of_run(path).claim if (path / "recipe.yaml").is_file() else None
    recipe = lookup.read(name)
    composed = prepare_job(overrides, config_dirs, recipe).composed
    chosen = {group: option for group, option in composed.choices.items() if group != "logger"}  # as in a run's recipe.yaml
    return RunFiles(recipe.path, name, None, "", compared(composed.unresolved, chosen), {}, Points(), Points()), recipe.claim


def _rows(both: Sequence[RunFiles]) -> list[tuple[str, ...]]:
    """The differences of the configs and the results of the runs: the report's table, transposed."""
    found = run_table.table(both, None)
    columns = dict(zip(found.header, zip(*found.texts(), strict=True), strict=True))
    columns["device"] = tuple(str(run.result.device_name or run.result.device) if run.result else "–" for run in both)
    versions = [{**run.environment.get("versions", {}), "commit": run.environment.get("git_commit")} for run in both]
    for name in dict.fromkeys(name for each in versions for name in each):
        if len({each.get(name) for each in versions if len(each) > 1}) > 1:
            columns[name] = tuple(str(each.get(name) or "–") for each in versions)
    shown = {name: texts for name, texts in columns.items() if name not in NOT_SHOWN and not set(texts) <= set(sheet.EMPTY)}
    return [(name, *map(printable, texts)) for name, texts in shown.items()]

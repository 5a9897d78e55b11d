"""`drivetrain recipe diff`: where two recipes or runs differ, what each came to, and what the difference is worth."""

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
from drivetrain.measure import arguments
from drivetrain.measure.benchmark import compare
from drivetrain.measure.benchmark.compare import Entry
from drivetrain.measure.claims.write import times, told
from drivetrain.recipe import reader as recipes
from drivetrain.recipe.reader import Recipe
from drivetrain.recipe.safe_yaml import printable
from drivetrain.run import reader
from drivetrain.run.reader import Points, RunFiles, compared, differing
from drivetrain.ui import terminal


@dataclass
class Settings(compare.Settings):
    """What the command itself can be told."""

    measure: bool = False  # let the two take turns now


@dataclass
class Side:
    """One of the two: a recipe, or a run's directory with the recipe that it left."""

    given: str
    recipe: Recipe | None
    run: RunFiles  # of a recipe: its config alone


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """`drivetrain recipe diff`; its exit code."""
    asked, rest = arguments.split(argv, Settings)
    compare.afresh("recipe diff", rest)
    names = [word for word in rest if "=" not in word or Path(word).exists()]
    words = [word for word in rest if word not in names]
    if len(names) != 2:
        raise UserError(
            f"drivetrain recipe diff wants two, each a recipe's name or path or a run's directory: given {len(names)}"
        )
    if any(key_of(word) == "recipe" for word in words):
        raise UserError("drivetrain recipe diff takes recipes by their names alone: leave recipe= out")
    sides = _sides(names, words, config_dirs)
    _show(sides)
    for side in sides:
        if side.recipe is not None and side.recipe.claim is not None:
            print(f"{side.given} claims {told(side.recipe.claim)}")
    if asked.measure:
        return _measure(sides, words, config_dirs, asked, argv)
    dirs = [part for folder in config_dirs for part in ("-cd", str(folder))]
    print(f"what it is worth: drivetrain recipe diff {shlex.join([*dirs, *names, *words, 'measure=true'])}")
    return DONE


def _sides(names: Sequence[str], words: Sequence[str], config_dirs: Sequence[str]) -> list[Side]:
    """Both, read. Raises UserError with what is wrong with either."""
    sides, problems = [], []
    for name in names:
        try:
            sides.append(_run(name) if Path(name).is_dir() else _recipe(name, words, config_dirs))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(dict.fromkeys(problems))
    return sides


def _run(name: str) -> Side:
    """A run, as its files have it."""
    path = Path(name)
    if not (path / "config.yaml").is_file():
        raise UserError(f"{name} is no run's directory (no config.yaml in it): name one such as outputs/<date>/<time>-<id>")
    file = path / "recipe.yaml"
    return Side(name, recipes.read(file) if file.is_file() else None, reader.read(path))


def _recipe(name: str, words: Sequence[str], config_dirs: Sequence[str]) -> Side:
    """A recipe's config under these words."""
    recipe = recipes.read(recipes.find(name))
    composed = prepare_job(words, config_dirs, recipe).composed
    tree: dict[str, Any] = yaml.safe_load(OmegaConf.to_yaml(composed.config))  # as a run's config.yaml has it
    chosen = {group: option for group, option in composed.choices.items() if group != "logger"}  # as its recipe.yaml has them
    files = RunFiles(recipe.path, name, None, "", compared(tree, chosen), {}, Points(), Points())
    return Side(name, recipe, files)


def _show(sides: Sequence[Side]) -> None:
    both = [side.run for side in sides]
    keys = differing(both)
    groups = [key.split(".")[0] for key in keys]
    keys.sort(key=lambda key: (groups.index(key.split(".")[0]), "." in key))  # an option, then its knobs
    rows = [(key, *(printable(_word(run.config.get(key))) for run in both)) for key in keys]
    header = ("", *(side.given for side in sides))
    if rows:
        terminal.table(header, rows)
    else:
        print("the configs are the same")
    if any(run.result is not None for run in both):
        print()
        terminal.table(header, _results(both))


def _word(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _results(both: Sequence[RunFiles]) -> list[tuple[str, ...]]:
    """What the runs came to, a row for each figure that one of them has; of versions, those that differ."""

    def each(name: str, form: str, value: Any) -> tuple[str, ...]:
        found = [value(run) for run in both]
        return (name, *("–" if v is None else form.format(v) for v in found))

    def of(attribute: str, factor: float = 1.0) -> Any:
        def value(run: RunFiles) -> float | None:
            found = getattr(run.result, attribute, None)
            return None if found is None else factor * found

        return value

    metric = next((run.metric[0] for run in both if run.metric), "metric")
    rows = [
        each("status", "{}", lambda run: run.status or None),
        each(metric, "{:.4f}", RunFiles.final), each(f"best {metric}", "{:.4f}", RunFiles.best),
        each("samples/s", "{:,.0f}", of("samples_per_second")), each("step p50", "{:.2f} ms", of("step_ms_p50")),
        each("memory", "{:.2f} GiB", of("peak_memory_bytes", 2**-30)), each("wall", "{:.1f} s", of("wall_s")),
        each("device", "{}", lambda run: run.result and (run.result.device_name or run.result.device)),
    ]  # fmt: skip
    versions = [{**(run.environment.get("versions") or {}), "commit": run.environment.get("git_commit")} for run in both]
    for name in dict.fromkeys(name for found in versions for name in found):
        if len({found.get(name) for found in versions if len(found) > 1}) > 1:
            rows.append((name, *(str(found.get(name) or "–") for found in versions)))
    return [tuple(map(printable, row)) for row in rows if set(row[1:]) != {"–"}]


def _measure(sides: Sequence[Side], words: Sequence[str], config_dirs: Sequence[str], asked: Settings, argv: list[str]) -> int:
    """Both in turns, the first as the baseline; the exit code."""
    entries = [_entry(side, words, config_dirs) for side in sides]
    if problems := [problem for entry in entries for problem in entry.problems]:
        raise UserError(dict.fromkeys(problems))
    done = compare.measure(entries, asked, words)
    other = done.rows[1].ratio
    if other is not None and other.low:
        word = "" if other.differs else ": no difference" if other.same else ": not told apart"
        done.said.append(f"{sides[1].given} has {times(*other)} the samples a second of {sides[0].given}{word}")
    print()
    compare.show(done)
    folder = compare.save(done, compare.first_job(entries), argv, "recipe diff")
    print(f"written to {folder}/compare.json and compare.html")
    return FAILED if any(row.error for row in done.rows) else DONE


def _entry(side: Side, words: Sequence[str], config_dirs: Sequence[str]) -> Entry:
    """A side as an arm. A run's own code is not taken from its files: the words name it, or the arm has what ships."""
    if side.recipe is None:
        return Entry(side.given, [*words], None, [f"{side.given} has no recipe.yaml: it cannot be measured"])
    recipe = side.recipe
    own = {group for group, option in recipe.choices.items() if option == "own"}
    named = {key_of(word) for word in words}
    if Path(side.given).is_dir():
        if missing := sorted(own - named):
            return Entry(side.given, [*words], None, [
                f"{side.given} ran code of its own: give {', '.join(f'{g}=own {g}.target=…' for g in missing)} and trust=[…] too"
            ])  # fmt: skip
        recipe = replace(recipe, choices={g: o for g, o in recipe.choices.items() if g not in own})
    return compare.entry(side.given, [f"recipe={recipe.path}", *words], config_dirs, None, recipe)

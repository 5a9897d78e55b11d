"""`drivetrain recipe`: list, show, check, export, verify and diff recipes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from drivetrain.cli.arguments import FILE, Command, overrides
from drivetrain.cli.measuring import measuring
from drivetrain.config import catalog
from drivetrain.config.catalog import options
from drivetrain.config.compose import compose
from drivetrain.core.errors import DONE, OperatorGives, UserError, collecting, did_you_mean, refuse
from drivetrain.core.options.overrides import key_of
from drivetrain.launch.job import checked
from drivetrain.recipe import fetch, lookup
from drivetrain.recipe.reader import Recipe
from drivetrain.run import recipe_file
from drivetrain.ui import output, terminal
from drivetrain.ui.output import echo, fold
from drivetrain.ui.sheet import Table

MOST = 32  # checked combinations of a sweep: a file of a few bytes can ask for a thousand


def check(recipe: Recipe, config_dirs: Sequence[str] = (), words: Sequence[str] = ()) -> list[str]:
    """Validate the recipe, the baseline of its claim, and its sweep's combinations. Raises UserError.

    `words` are overrides for the check, such as the `trust` for own code. From a large sweep, only some combinations are
    validated, with each value if there are few. Returns notices, a line each: the number of checked combinations, the settings
    left to the command line, and the changes since the recipe was written.
    """
    groups = options(config_dirs)
    every = list(recipe.cells(groups))
    first = every[0][0]
    one_apart = [row for row in every if sum(row[0][key] is not value for key, value in first.items()) <= 1]
    chosen = every if len(every) <= MOST else one_apart[:MOST]
    said = [f"{len(chosen)} of its {len(every)} combinations were checked"] if len(chosen) < len(every) else []
    parts = [cell for _, cell in chosen]
    if recipe.claim is not None and recipe.claim.speed is not None:
        parts.append(recipe.baseline(groups))
    for part in parts:
        said += _check_one(part, config_dirs, words)
    return list(dict.fromkeys(said))


def _check_one(recipe: Recipe, config_dirs: Sequence[str], words: Sequence[str]) -> list[str]:
    """Validate one config; return notices, including missing settings that no recipe may set, such as the data's path."""
    try:
        job = checked(compose(words, config_dirs, base=recipe))
    except UserError as error:
        if others := [problem for problem in error.problems if not isinstance(problem, OperatorGives)]:
            raise UserError(others) from None
        return [f"left to the command line: {problem}" for problem in error.problems]
    return [*job.composed.notices, *recipe_file.notices(job.shared, config_dirs, job.run.values["trust"])]


HELP = """\
drivetrain recipe VERB …      recipes: options and values, shared as plain YAML that cannot hold code

  drivetrain recipe list                               all that recipe=NAME finds
  drivetrain recipe show NAME|PATH|ADDRESS             its text
  drivetrain recipe check NAME|PATH|ADDRESS …          is it valid? Every problem with file and line
  drivetrain recipe export RUN [RUN …] [--out FILE]    the recipe of a run, or of several seeds' runs, and what they claim
  drivetrain recipe verify NAME|PATH [key=value] …     does its claim hold on this machine? Measured again, kind by kind
  drivetrain recipe diff A B [key=value] …             the differences of two recipes or runs
  drivetrain recipe schema [--out FILE]                the JSON Schema of recipes, for editors

  target=accuracy>=0.98  of export: also claim the updates and seconds to it (quote it: > is the shell's)
  set=test, metric=loss  of export: claim the final value of another set or metric than the one that ranks models
  --quick               of verify: the speed alone, without whole trainings
  seeds=5               of verify: trainings, with seeds that the claim did not have
  rounds=20, block_s=0.4  of verify: as for `drivetrain compare`
  quality=true          of verify: also train the baseline to its end
  --out FILE            of export and schema: the file to write; of verify: the folder
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

exit codes of verify: 0 something holds and nothing is refuted · 1 something does not hold · 2 no claim, or a bad command line ·
4 undecidable here: another device, other data
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain recipe`; its exit code."""
    if {"-h", "--help"}.intersection(argv):
        echo(fold(HELP))
        return DONE
    if not argv or argv[0] not in VERBS:
        given = f"'{argv[0]}' is not one of these: {did_you_mean(argv[0], VERBS)}" if argv else "nothing is given"
        wanted = "list, show NAME, check NAME …, export RUN … [--out FILE], verify NAME, diff A B or schema [--out FILE]"
        raise UserError(f"drivetrain recipe needs {wanted}: {given}")
    return VERBS[argv[0]](["quick=true" if word == "--quick" else word for word in argv[1:]])


def complete(words: Sequence[str], last: str) -> Sequence[str]:
    """The words that TAB offers: a verb, then the names of its recipes, then overrides if it takes any."""
    if not words or words[0] == "schema":
        return [] if words else [*VERBS]
    names = {"verify": 1, "diff": 2}.get(words[0])
    return lookup.names() if names is None or len(words) <= names else overrides(words, last)


def _list(argv: Sequence[str]) -> int:
    if argv:
        raise UserError(f"drivetrain recipe list shows them all: leave out {' '.join(argv)}, or give show {argv[0]}")
    Table(("recipe", "what it is"), [(name, lookup.read(name).description) for name in lookup.names()]).show()
    return DONE


def _check(given: argparse.Namespace) -> int:
    if not given.overrides:
        raise UserError("drivetrain recipe check needs the name or path of a recipe")
    trust = [word for word in given.overrides if key_of(word) == "trust"]  # the user's code, which the check imports, may print
    problems: list[str] = []
    for name in (word for word in given.overrides if word not in trust):
        with collecting(problems):
            echo("\n  ".join([f"{name}: valid", *check(lookup.read(name), given.config_dir, trust)]))
    refuse(problems)
    return DONE


def _show(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        raise UserError(f"drivetrain recipe show needs one name, path or address: {', '.join(lookup.names())}")
    fetch.on_fetch.clear()  # printed here instead
    content = lookup.load(argv[0])[1]
    echo(output.text(content) if terminal.is_live() else content.decode(errors="replace").rstrip("\n"))
    return DONE


def _schema(given: argparse.Namespace) -> int:
    """Print the JSON Schema of recipes, or write it to FILE, replacing it. docs/recipes.md shows its use in editors."""
    from drivetrain.cli.recipe_schema import recipe_schema

    given.overrides += [str(given.out)] if given.out is not None else []
    if len(given.overrides) > 1:
        raise UserError(f"drivetrain recipe schema writes one file: leave out {' '.join(given.overrides[1:])}")
    refuse(catalog.problems(given.config_dir))
    text = json.dumps(recipe_schema(given.config_dir), indent=1, ensure_ascii=False) + "\n"
    if not given.overrides:
        echo(text, end="")
        return DONE
    file = Path(given.overrides[0])
    if file.suffix != ".json":
        raise UserError(f"drivetrain recipe schema {file} writes JSON: give a file such as {file.with_suffix('.schema.json')}")
    with output.writing(file):
        file.write_text(text, encoding="utf-8")
    echo(f"written to {file}: editors complete and check a recipe that begins with `# yaml-language-server: $schema={file}`")
    return DONE


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "list": _list, "show": _show,
    "check": Command("recipe check", _check, HELP, takes_paths=True),
    "schema": Command("recipe schema", _schema, HELP, {"--out": FILE}, takes_paths=True),
    **{name: measuring(f"recipe {name}", f"claims.{name}:command", HELP) for name in ("export", "verify")},
    "diff": measuring("recipe diff", "claims.diff:command", HELP.replace("  --out ", "")),
}  # fmt: skip

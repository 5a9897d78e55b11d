"""`drivetrain recipe`: what there is, whether it is good, what it is worth, and the one that a run leaves."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from drivetrain.config.compose import compose, options
from drivetrain.core.errors import DONE, UserError, did_you_mean
from drivetrain.core.paths import add_own_places
from drivetrain.launch.job import checked
from drivetrain.recipe import reader as recipe
from drivetrain.ui.terminal import table

HELP = """\
drivetrain recipe VERB …      recipes: option and value, shared as plain YAML that can hold no code

  drivetrain recipe list                               all that recipe=NAME finds
  drivetrain recipe show NAME                          its text
  drivetrain recipe check NAME|PATH …                  is it good? All that is wrong with it, by file and line
  drivetrain recipe export RUN [FILE]                  what replays a run, with where it comes from and what it came to
  drivetrain recipe verify NAME|PATH [key=value] …     does what it claims hold on this machine?
  drivetrain recipe diff A B [key=value] …             where two recipes or runs differ, and what that is worth

  rounds=20, block_s=0.4 of verify, and of diff measure=true: as for `drivetrain compare`
  quality=true, seeds=5 train both to the end too
  measure=true          of diff: run an interleaved benchmark of the two now
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

exit codes of verify: 0 holds · 1 does not hold · 2 nothing claimed, or wrong words
"""


def command(argv: list[str]) -> int:
    """`drivetrain recipe`; its exit code."""
    if {"-h", "--help"}.intersection(argv):
        print(HELP)
        return DONE
    if not argv or argv[0] not in VERBS:
        given = f"'{argv[0]}': {did_you_mean(argv[0], VERBS)}" if argv else ""
        wanted = "list, show NAME, check NAME|PATH …, export RUN [FILE], verify NAME|PATH or diff A B"
        raise UserError(f"drivetrain recipe wants {wanted} {given}".rstrip())
    return VERBS[argv[0]](argv[1:])


def _list(argv: list[str]) -> int:
    if argv:
        raise UserError(f"drivetrain recipe list shows them all: leave out {' '.join(argv)}, or say show {argv[0]}")
    table(("recipe", "what it is"), [(name, recipe.read(recipe.find(name)).description) for name in recipe.shipped()])
    return DONE


def _show(argv: list[str]) -> int:
    if len(argv) != 1:
        raise UserError(f"drivetrain recipe show wants one name: {', '.join(recipe.shipped())}")
    print(recipe.find(argv[0]).read_text(), end="")
    return DONE


def _check(argv: list[str]) -> int:
    if not argv:
        raise UserError("drivetrain recipe check wants the name or path of a recipe")
    problems, groups = [], options()
    for name in argv:
        try:
            found = recipe.read(recipe.find(name))
            for _, cell in found.cells(groups):
                checked(compose([], base=cell))
            if found.claim is not None:
                checked(compose([], base=found.baseline(groups)))
            print(f"{name}: good")
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(dict.fromkeys(problems))
    return DONE


def _export(argv: list[str]) -> int:
    if not 1 <= len(argv) <= 2:
        raise UserError("drivetrain recipe export wants a run's directory, and a file if it is not for the screen")
    source = Path(argv[0]) / "recipe.yaml"
    if not source.is_file():
        raise UserError(f"{argv[0]} is no run's directory (no recipe.yaml in it): name one such as outputs/<date>/<time>-<id>")
    recipe.read(source)
    from drivetrain.measure.claims import provenance

    text = provenance.of(Path(argv[0])) + source.read_text()
    if len(argv) == 1:
        print(text, end="")
    elif Path(argv[1]).exists():
        raise UserError(f"{argv[1]} is there already: remove it or name another file")
    else:
        Path(argv[1]).write_text(text)
        print(f"written to {argv[1]}: run it by `python -m src.train recipe={argv[1]}`")
    return DONE


def _measured(module: str) -> Callable[[list[str]], int]:
    """A verb that is a module of its own, with the words and the config dirs that it is given."""

    def run(argv: list[str]) -> int:
        parser = argparse.ArgumentParser(prog="drivetrain recipe", add_help=False)
        parser.add_argument("words", nargs="*")
        parser.add_argument("-cd", "--config-dir", action="append", default=[])
        given = parser.parse_intermixed_args(argv)
        add_own_places(given.config_dir)
        return int(import_module(f"drivetrain.measure.{module}").command(given.words, given.config_dir))

    return run


VERBS: dict[str, Callable[[list[str]], int]] = {
    "list": _list, "show": _show, "check": _check, "export": _export,
    "verify": _measured("claims.verify"), "diff": _measured("claims.diff"),
}  # fmt: skip

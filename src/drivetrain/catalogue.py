"""`drivetrain list` and `drivetrain recipe`: what there is, with what it buys."""

from __future__ import annotations

import shutil
from pathlib import Path

from drivetrain import recipe
from drivetrain.compose import compose, options
from drivetrain.errors import DONE, UserError, did_you_mean
from drivetrain.job import checked
from drivetrain.paths import conf_dir
from drivetrain.terminal import table


def line_of(file: Path) -> str:
    """The first comment of an option's YAML: what the option buys."""
    comments = (line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#"))
    return next((c for c in comments if not c.startswith("@package")), "")


def show(group: str | None = None) -> None:
    """Every option with its line; of one group, every knob too. Raises UserError for a group there is not."""
    groups = options()
    if group is None:
        table(("group", "option", "what it buys"), [
            (g if first else "", name, line_of(conf_dir() / g / f"{name}.yaml"))
            for g, names in groups.items() for first, name in zip([True] + [False] * len(names), names, strict=False)
        ])  # fmt: skip
        return
    if group not in groups:
        raise UserError(f"there is no group '{group}': {did_you_mean(group, groups)}")
    for name in groups[group]:
        text = (conf_dir() / group / f"{name}.yaml").read_text()
        knobs = [line for line in text.splitlines() if not line.startswith(("#", "_target_"))]
        print(f"{group}={name}: {line_of(conf_dir() / group / f'{name}.yaml')}")
        print("".join(f"    {group}.{knob}\n" for knob in knobs))


def recipe_command(argv: list[str]) -> int:
    """`drivetrain recipe list | show NAME | check NAME|PATH … | export RUN [FILE]`."""
    verbs = {"list": _list, "show": _show, "check": _check, "export": _export}
    if not argv or argv[0] not in verbs:
        given = f"'{argv[0]}': {did_you_mean(argv[0], verbs)}" if argv else ""
        raise UserError(f"drivetrain recipe wants list, show NAME, check NAME|PATH … or export RUN [FILE] {given}".rstrip())
    verbs[argv[0]](argv[1:])
    return DONE


def _list(argv: list[str]) -> None:
    if argv:
        raise UserError(f"drivetrain recipe list shows them all: leave out {' '.join(argv)}, or say show {argv[0]}")
    table(("recipe", "what it is"), [(name, recipe.read(recipe.find(name)).description) for name in recipe.shipped()])


def _show(argv: list[str]) -> None:
    if len(argv) != 1:
        raise UserError(f"drivetrain recipe show wants one name: {', '.join(recipe.shipped())}")
    print(recipe.find(argv[0]).read_text(), end="")


def _check(argv: list[str]) -> None:
    if not argv:
        raise UserError("drivetrain recipe check wants the name or path of a recipe")
    problems = []
    for name in argv:
        try:
            for _, cell in recipe.read(recipe.find(name)).cells(options()):
                checked(compose([], base=cell))
            print(f"{name}: good")
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(dict.fromkeys(problems))


def _export(argv: list[str]) -> None:
    if not 1 <= len(argv) <= 2:
        raise UserError("drivetrain recipe export wants a run's directory, and a file if it is not for the screen")
    source = Path(argv[0]) / "recipe.yaml"
    if not source.is_file():
        raise UserError(f"{argv[0]} is no run's directory (no recipe.yaml in it): name one such as outputs/<date>/<time>-<id>")
    recipe.read(source)
    if len(argv) == 1:
        print(source.read_text(), end="")
    elif Path(argv[1]).exists():
        raise UserError(f"{argv[1]} is there already: remove it or name another file")
    else:
        shutil.copyfile(source, argv[1])
        print(f"written to {argv[1]}: run it by `python -m src.train recipe={argv[1]}`")

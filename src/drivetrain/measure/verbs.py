"""The files of a measurement: a folder below the run's output_dir, with its figures as JSON and its sheet as a page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from drivetrain.config import schema
from drivetrain.core.errors import UserError, refuse
from drivetrain.core.machine.files import write_json
from drivetrain.core.machine.paths import expanded
from drivetrain.core.options.overrides import key_of, single_values
from drivetrain.launch.job import Job
from drivetrain.run import directory, environment
from drivetrain.ui import sheet
from drivetrain.ui.output import echo

_chosen: ContextVar[Path | None] = ContextVar("_chosen", default=None)


@contextmanager
def into(place: Path | None) -> Iterator[None]:
    """Within the context a verb's files go into this folder; None: into a new one below the run's output_dir."""
    token = _chosen.set(place if place is None else expanded(place))
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen() -> Path | None:
    """The place set by `into`."""
    return _chosen.get()


def folder(job: Job, verb: str) -> Path:
    """The folder for a verb's files."""
    if (place := chosen()) is None:
        return directory.create(Path(job.run.values["output_dir"]), verb)
    place.mkdir(parents=True, exist_ok=True)
    return place


def write(place: Path, name: str, page: sheet.Sheet, command: Sequence[str], content: object) -> None:
    """Write NAME.json, and NAME.html, which ends with the command and the environment; print where."""
    write_json(place / f"{name}.json", content)
    found = origin(command, environment.describe([], "", {}))
    replace(page, sections=[*page.sections, *found]).write(place / f"{name}.html")
    echo(f"written to {place}/{name}.json and {name}.html")


def leave(job: Job, verb: str, page: sheet.Sheet, command: Sequence[str], content: object) -> None:
    """Show a verb's findings, and write them to a new folder."""
    page.show()
    write(folder(job, verb), verb, page, command, content)


def origin(command: Sequence[str], about: dict[str, object]) -> list[sheet.Section]:
    """The command that repeats a measurement, and the environment in which it ran."""
    again = sheet.commands(shlex.join(["drivetrain", *command]))
    return [*sheet.under("How to reproduce it", again), *sheet.under("Where it ran", sheet.machine(about))]


def seconds(text: str) -> float | None:
    """The seconds of a time such as 90s, 5m or 2h; None for any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text)
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2] or "s"] if found else None


T = TypeVar("T")


def split(arguments: Sequence[str], kind: type[T], verb: str = "", recipe: Path | None = None) -> tuple[T, list[str]]:
    """Return the command's settings and the remaining arguments, which override the run.

    `kind` is a dataclass: its fields are the names and types of the settings. A `verb` measures runs from their beginning;
    `recipe` is a file for it to write. Raises UserError with every problem found.
    """
    takes = schema.of(kind)
    problems: list[str] = []
    own = [argument for argument in arguments if key_of(argument) in takes.hints and "=" in argument]
    values = single_values(own, "command", problems)
    problems += takes.problems("", values)
    refuse(problems)
    check_file(recipe)
    overrides = [argument for argument in arguments if argument not in own]
    if verb:
        refuse_resume(verb, overrides)
    return kind(**values), overrides


def refuse_resume(command: str, overrides: Sequence[str]) -> None:
    """Raise UserError for resume=…, because measuring starts every run at its beginning."""
    if any(key_of(override) == "resume" for override in overrides):
        raise UserError(f"drivetrain {command} measures runs from their beginning: leave resume= out")


def check_file(file: Path | None) -> None:
    """Raise UserError if a recipe cannot be written to this file; called before the measurement."""
    if file is None:
        return
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"{file}: a recipe's file ends in .yaml")
    if file.exists():
        raise UserError(f"{file} is there already: remove it or name another file")
    if not file.parent.is_dir():
        raise UserError(f"{file}: there is no folder {file.parent}")

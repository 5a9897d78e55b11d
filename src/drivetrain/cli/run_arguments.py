"""The arguments that the verbs on a finished run share: RUN, which checkpoint, overrides, --config-dir and --help."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.cli import arguments, completion
from drivetrain.core.errors import UserError
from drivetrain.core.overrides import key_of
from drivetrain.core.paths import add_import_paths, expanded
from drivetrain.ema.base import BELOW, NARROWEST
from drivetrain.inference.finished import Choice
from drivetrain.ui.output import echo, fold

OF_CHOICE = """\
  update=N              the checkpoint of this update; best: of the best evaluation; last: the newest valid one
                        (default: best where the run kept it, as saving=best does, else last)
  average=true          the averaged weights (ema=ema) instead of the trained ones; average=0.08: those of this relative width,
                        of a run with ema=post_hoc
  'trust=[my_pkg]'      for a run with code of your own: a run's files are not trusted to name code
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml"""


@dataclass
class RunArguments:
    """What was given for a finished run."""

    run_dir: Path
    paths: list[str]  # further words that are no settings
    overrides: list[str]
    choice: Choice
    config_dirs: list[str]
    options: argparse.Namespace


def parse(verb: str, argv: Sequence[str], help_text: str, **options: dict[str, Any]) -> RunArguments | None:
    """A verb's arguments, its own `options` as argparse takes them; None once its help has been printed. Raises UserError."""
    made = arguments.parser(verb)
    for name, kind in options.items():
        made.add_argument(f"--{name.replace('_', '-')}", **kind)
    given = made.parse_intermixed_args(list(argv))
    if given.help or not argv:
        echo(fold(help_text))
        return None
    settings = [word for word in given.overrides if _is_setting(word)]
    paths = [word for word in given.overrides if word not in settings]
    if not paths:
        raise UserError(f"drivetrain {verb} needs a run's directory, such as outputs/<date>/<time>-<id>")
    add_import_paths(given.config_dir)
    choice, overrides = _choice(settings)
    return RunArguments(expanded(paths[0]), paths[1:], overrides, choice, given.config_dir, given)


def _is_setting(word: str) -> bool:
    return "=" in word and "/" not in word.partition("=")[0] and not Path(word).exists()


def _choice(settings: Sequence[str]) -> tuple[Choice, list[str]]:
    """Which weights and which set the settings choose, and those that are overrides of the config. Raises UserError."""
    choice, rest, wrong = Choice(), [], []
    for word in settings:
        key, value = key_of(word), word.partition("=")[2]
        if key == "update" and (value in ("best", "last") or value.isdecimal()):
            choice.update = value
        elif key == "average" and value in ("true", "false"):
            choice.average = value == "true"
        elif key == "average" and (width := _width(value)) is not None:
            choice.average = width
        elif key == "split" and value in ("test", "validation"):
            choice.split = value
        elif key == "split":
            wrong.append(f"{word}: say split=test or split=validation")
        elif key in ("update", "average"):
            wrong.append(
                f"{word}: say update=N, update=best, update=last, average=true, or average=0.08 for a width of 0.001 to 0.28"
            )
        else:
            rest.append(word)
    if wrong:
        raise UserError(wrong)
    return choice, rest


def _width(value: str) -> float | None:
    """The relative width of an average; None where the text is none."""
    try:
        width = float(value)
    except ValueError:
        return None
    return width if NARROWEST <= width < BELOW else None


def complete(words: Sequence[str], last: str, *options: str) -> list[str]:
    """What TAB offers: runs below outputs/ for the first word, then settings and overrides."""
    if (
        not [word for word in words if "=" not in word and not word.startswith("-")]
        and not last.startswith("-")
        and "=" not in last
    ):
        return completion.runs()
    own = ["update=best", "update=last", "average=true", *options]
    return [*own, *completion.overrides(words, last)]

"""The arguments that verbs on a config share: overrides, --config-dir and --help."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from drivetrain.core.paths import add_import_paths


def parser(verb: str) -> argparse.ArgumentParser:
    """A parser of overrides, --config-dir and --help, to which a verb may add its own arguments."""
    made = argparse.ArgumentParser(prog=f"drivetrain {verb}", add_help=False)
    made.add_argument("overrides", nargs="*")
    made.add_argument("-cd", "--config-dir", action="append", default=[])
    made.add_argument("-h", "--help", action="store_true")
    return made


def parse(verb: str, argv: Sequence[str], help_text: str, *paths: str) -> argparse.Namespace | None:
    """A verb's arguments, with `paths` the names of further options that take a path; None once --help has been printed.

    The config dirs are checked and their classes made importable. Raises UserError.
    """
    made = parser(verb)
    for option in paths:
        made.add_argument(option, type=Path)
    given = made.parse_intermixed_args(argv)
    if given.help:
        print(help_text)
        return None
    add_import_paths(given.config_dir)
    return given

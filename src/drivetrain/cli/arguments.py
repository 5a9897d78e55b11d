"""The arguments that verbs on a config share: overrides, --config-dir, --config-name and --help."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from drivetrain.config.hydra_idioms import recipe_word, translated
from drivetrain.config.keys import as_setting
from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.paths import add_import_paths
from drivetrain.ui.output import echo, fold


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are a UserError of one line."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        settings = [self._setting(flag) for flag in unknown.split() if as_setting(flag)]
        if unknown != message and settings:
            raise UserError(f"{self.prog}: write settings as key=value: {', '.join(settings)}")
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        hint = f": {did_you_mean(unknown.split('=')[0].split()[0], flags)}" if unknown != message else ""
        raise UserError(f"{self.prog}: {message}{hint}")

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and keep the words, for the answer to one that is not known."""
        self._words = list(args or ())
        return super().parse_intermixed_args(args, namespace)

    def _setting(self, flag: str) -> str:
        """What a flag of another tool is here, with its value where the next word is one."""
        words = getattr(self, "_words", [])
        following = words[words.index(flag) + 1 :][:1] if flag in words and "=" not in flag else []
        value = next((word for word in following if "=" not in word and not word.startswith("-")), None)
        return f"{flag}{f' {value}' if value else ''} is {as_setting(flag, value)}"


def parser(verb: str) -> argparse.ArgumentParser:
    """A parser of the shared arguments, to which a verb may add its own."""
    made = Parser(prog=f"drivetrain {verb}", add_help=False)
    made.add_argument("overrides", nargs="*")
    made.add_argument("-cd", "--config-dir", action="append", default=[])
    made.add_argument("-cn", "--config-name")
    made.add_argument("-cp", "--config-path")
    made.add_argument("-h", "--help", action="store_true")
    return made


def parse_with(made: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, with the overrides in drivetrain's words.

    The config dirs are checked and their classes made importable. Raises UserError.
    """
    given = made.parse_intermixed_args(argv)
    if given.help:
        return given
    add_import_paths(given.config_dir)
    if given.config_path is not None:
        hint = "give a folder with your own options by --config-dir FOLDER"
        raise UserError(f"--config-path {given.config_path}: drivetrain's own config is the one to start from: {hint}")
    given.overrides = translated(given.overrides, given.config_dir)
    if given.config_name not in (None, "config", "config.yaml"):  # conf/config.yaml is where every run starts
        given.overrides = [f"recipe={recipe_word(given.config_name, given.config_dir)}", *given.overrides]
    return given


def parse(verb: str, argv: Sequence[str], help_text: str, *options: str) -> argparse.Namespace | None:
    """A verb's arguments; None once --help has been printed. Raises UserError.

    A further option is "--flag", "--file FILE" for a path, or "--key VALUE" for another way to write key=VALUE. `values` are
    those of flags and files, in their order.
    """
    made, names, settings = parser(verb), list[str](), list[str]()
    for option, _, kind in (each.partition(" ") for each in options):
        (settings if kind == "VALUE" else names).append(option.removeprefix("--"))
        made.add_argument(option, **({"type": Path if kind == "FILE" else str} if kind else {"action": "store_true"}))
    given = parse_with(made, argv)
    if given.help:
        echo(fold(help_text))
        return None
    given.overrides += [f"{key}={getattr(given, key)}" for key in settings if getattr(given, key) is not None]
    given.values = [getattr(given, name) for name in names]
    return given

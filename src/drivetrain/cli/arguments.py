"""The arguments that verbs on a config share: overrides, --config-dir, --config-name and --help."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from drivetrain.config.elsewhere import NOT_HERE
from drivetrain.config.hydra_words import recipe_word, translated
from drivetrain.config.keys import as_setting
from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.paths import add_import_paths
from drivetrain.ui.output import echo, fold

OWN_KEY = re.compile(r"(?:^  |, )'?(\w+)=", re.M)  # in a verb's help: a setting at the start of its line, or after another one


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are a UserError of one line."""

    settings: Sequence[str] = ()  # of the verb's own, which are written as key=value

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        flags = unknown.split() if unknown != message else []
        if absent := [f"{flag} is no setting here: {NOT_HERE[word]}" for flag in flags if (word := _word(flag)) in NOT_HERE]:
            raise UserError([f"{self.prog}: {each}" for each in absent])
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        own = [f"{flag}: did you mean {near}?" for flag in flags for near in known if _is_longer(flag.partition("=")[0], near)]
        if own:
            raise UserError([f"{self.prog}: {each}" for each in own])
        settings = [setting for flag in flags if (setting := self._setting(flag))]
        if settings:
            raise UserError(f"{self.prog}: write settings as key=value: {', '.join(settings)}")
        hint = f": {did_you_mean(flags[0].split('=')[0], known)}" if flags else ""
        raise UserError(f"{self.prog}: {message}{hint}")

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and keep the words, for the answer to one that is not known."""
        self._words = list(args or ())
        return super().parse_intermixed_args(args, namespace)

    def _setting(self, flag: str) -> str | None:
        """A flag as a setting, with its value where the next word is one; None where it is no setting."""
        words = getattr(self, "_words", [])
        following = words[words.index(flag) + 1 :][:1] if flag in words and "=" not in flag else []
        value = next((word for word in following if "=" not in word and not word.startswith("-")), None)
        key = next((key for key in self.settings if _word(flag) in (key, key.removesuffix("_s"))), None)
        own = flag.partition("=")[2]
        meant = f"{key}={own or value or 'true'}" if key else as_setting(flag, value)
        return meant and f"{flag}{f' {value}' if value else ''} is {meant}"


def _is_longer(flag: str, known: str) -> bool:
    """Whether a flag is a known one with further letters, such as --output for --out."""
    return flag.removeprefix(known).isalpha() and flag.startswith(known)


def _word(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_").partition("=")[0]


def parser(verb: str) -> Parser:
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
    if "=" in given.overrides[1:-1]:  # epochs = 3
        at = given.overrides.index("=", 1)
        key, value = given.overrides[at - 1], given.overrides[at + 1]
        raise UserError(f"'{key} = {value}': a setting has no spaces around its =: say {key}={value}")
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
    made.settings = OWN_KEY.findall(help_text)
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

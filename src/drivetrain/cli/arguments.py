"""A verb of the command line, and the arguments that verbs share: overrides, --config-dir, --config-name and --help."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from drivetrain.config import catalog
from drivetrain.config.hydra_words import recipe_word, translated
from drivetrain.config.keys import as_setting
from drivetrain.config.other_tools import NOT_HERE
from drivetrain.core.errors import DONE, UserError, did_you_mean
from drivetrain.core.machine.paths import add_import_paths
from drivetrain.recipe import lookup
from drivetrain.run import directory
from drivetrain.ui.output import echo, fold

OWN_KEY = re.compile(r"(?:^  |, )'?(\w+)=", re.M)  # a setting in a verb's help: at the start of its line, or after another one
FLAG, FILE, NUMBER = {"action": "store_true"}, {"type": Path}, {"type": int}  # kinds of options, as argparse takes them
WORDS = {"action": "append", "default": []}  # words that may begin with -, one per occurrence


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError, with a line for each unknown flag."""

    settings: Sequence[str] = ()  # the verb's own settings, written as key=value
    words: Sequence[str] = ()  # the words being parsed

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        flags = unknown.split() if unknown != message else []
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        hint = f": {did_you_mean(flags[0].split('=')[0], known)}" if flags else ""
        said = [answer for flag in flags if (answer := self._answer(flag, known))]
        raise UserError([f"{self.prog}: {each}" for each in said or [f"{message}{hint}"]])

    def _answer(self, flag: str, known: Sequence[str]) -> str | None:
        """The words to write instead of an unknown flag; None if nothing known is similar."""
        name, _, own = flag.partition("=")
        word = name.lstrip("-").replace("-", "_")
        if word in NOT_HERE:
            return f"{flag} is no setting here: {NOT_HERE[word]}"
        if near := next((each for each in known if name.startswith(each) and name.removeprefix(each).isalpha()), None):
            return f"{flag}: did you mean {near}?"  # with further letters, such as --output for --out
        at = self.words.index(flag) + 1 if flag in self.words and not own else len(self.words)
        value = next((each for each in self.words[at : at + 1] if "=" not in each and not each.startswith("-")), None)
        key = next((key for key in self.settings if word in (key, key.removesuffix("_s"))), None)
        meant = f"{key}={own or value or 'true'}" if key else as_setting(flag, value)
        return meant and f"write settings as key=value: {flag}{f' {value}' if value else ''} is {meant}"


@dataclass(frozen=True)
class Command:
    """A verb: its function (parsed arguments → exit code), its help, and its options.

    `options` are passed to argparse, and the function finds their values among its arguments. `settings` may also be written as
    --key VALUE.
    """

    name: str
    work: Callable[[argparse.Namespace], int]
    help: str
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Sequence[str] = ()
    takes_paths: bool = False  # its words need not be overrides, and stay unchanged
    offers: Callable[[Sequence[str], str], Sequence[str]] | None = None  # TAB's words; None: overrides
    more_help: Callable[[Sequence[str]], str] | None = None  # text after its help, by the config dirs

    def __call__(self, argv: Sequence[str]) -> int:
        """Run the verb; its exit code. Raises UserError."""
        given = self._parse(argv)
        if given.help:
            echo(fold(self.help))
            if self.more_help is not None:
                echo(self.more_help(given.config_dir))
            return DONE
        if "=" in given.overrides[1:-1] and not self.takes_paths:  # epochs = 3
            at = given.overrides.index("=", 1)
            key, value = given.overrides[at - 1], given.overrides[at + 1]
            raise UserError(f"'{key} = {value}': a setting has no spaces around its =: say {key}={value}")
        given.overrides = [str(directory.named(word)) if word == directory.LAST else word for word in given.overrides]
        add_import_paths(given.config_dir)
        if given.config_path is not None:
            hint = "give a folder with your own options by --config-dir FOLDER"
            raise UserError(f"--config-path {given.config_path}: every run starts from drivetrain's own config: {hint}")
        if not self.takes_paths:
            given.overrides = translated(given.overrides, given.config_dir)
            if given.config_name not in (None, "config", "config.yaml"):  # every run starts from conf/config.yaml
                given.overrides = [f"recipe={recipe_word(given.config_name, given.config_dir)}", *given.overrides]
            given.overrides += [f"{key}={getattr(given, key)}" for key in self.settings if getattr(given, key) is not None]
        return self.work(given)

    def _parse(self, argv: Sequence[str]) -> argparse.Namespace:
        made = Parser(prog=f"drivetrain {self.name}", add_help=False)
        made.settings, made.words = OWN_KEY.findall(self.help), list(argv)
        made.add_argument("overrides", nargs="*")
        made.add_argument("-cd", "--config-dir", action="append", default=[])
        made.add_argument("-cn", "--config-name")
        made.add_argument("-cp", "--config-path")
        made.add_argument("-h", "--help", action="store_true")
        for flags, kind in {**{f"--{key}": {} for key in self.settings}, **self.options}.items():
            made.add_argument(*flags.split(), **kind)
        given = list(argv)
        for at in reversed([n for n, word in enumerate(argv[:-1]) if self.options.get(word) is WORDS]):
            given[at : at + 2] = [f"{given[at]}={given[at + 1]}"]  # argparse would take --amp as its own option
        return made.parse_intermixed_args(given)

    def complete(self, words: Sequence[str], last: str) -> Sequence[str]:
        """The words that TAB offers."""
        return (self.offers or overrides)(words, last)


# --- what TAB offers ---


def runs() -> list[str]:
    """The newest runs below outputs/."""
    return [str(path) for path in directory.newest_first(Path("outputs"))[:50]]


def overrides(words: Sequence[str], last: str) -> list[str]:
    """Completions of an override that begins with `last`, given the words before it."""
    if last.startswith("hy"):
        from drivetrain.sweeps.options import completions

        return completions()
    given = [[*words[n + 1 : n + 2]] if word in ("-cd", "--config-dir") else [word.removeprefix("--config-dir=")]
             for n, word in enumerate(words) if word.startswith(("-cd", "--config-dir"))]  # fmt: skip
    config_dirs = [folder for each in given for folder in each]
    groups = catalog.options(config_dirs)
    key, equals, value = last.partition("=")
    if equals:
        names = groups.get(key, []) if key != "recipe" else lookup.names()
        head = value[: value.rfind(",") + 1]  # of a sweep: precision=fp32,b…
        return [f"{key}={head}{name}" for name in names]
    group = key.split(".")[0]
    if "." in key and group in groups:
        return sorted(f"{group}.{setting}=" for setting in _settings(group, groups[group], config_dirs))
    values = [name for name in catalog.root_config() if name != "defaults"]
    return [f"{name}=" for name in [*groups, *values]] + [f"{group}." for group in groups]


def _settings(group: str, options: Sequence[str], config_dirs: Sequence[str]) -> set[str]:
    """The settings of all options of a group; in groups of several options, below the option's name."""
    keys = {option: catalog.option_keys(group, option, config_dirs) - {"_target_"} for option in options}
    return {f"{option}.{key}" if group in catalog.LISTS else key for option, names in keys.items() for key in names}

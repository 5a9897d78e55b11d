"""`drivetrain list`: the options, with a description of each."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from drivetrain.cli.arguments import Command
from drivetrain.config import catalog, plugins
from drivetrain.config.other_tools import suggestion
from drivetrain.core.errors import DONE, UserError, did_you_mean, refuse
from drivetrain.core.options.option import Option
from drivetrain.core.user.code import import_name
from drivetrain.ui.output import echo
from drivetrain.ui.sheet import Table

logger = logging.getLogger(__name__)

HELP = """\
drivetrain list [GROUP]         every option of every group, or of one, with what it does
drivetrain list GROUP=OPTION    one option: what it does, when it helps, what it claims of training, what was measured, its keys
drivetrain list KEY             what a key of no group does, such as target, stages or epochs

`effect` is what an option claims of training: exact, the same numbers as without it; close, the same mathematics, rounded or
summed otherwise; changes, another run. `drivetrain compare` tests the claim.

  -cd, --config-dir DIR your own options too: DIR/<group>/<option>.yaml

This includes options of installed plugins: see drivetrain/config/plugins.py.
"""


def _show(given: argparse.Namespace) -> int:
    if len(given.overrides) > 1:
        raise UserError(f"drivetrain list shows one group at a time: leave out {' '.join(given.overrides[1:])}")
    show(given.overrides[0] if given.overrides else None, given.config_dir)
    return DONE


def _offers(words: Sequence[str], last: str) -> Sequence[str]:
    """The words that TAB offers after `drivetrain list`: the groups, and the keys of no group."""
    return [*catalog.options(), *catalog.root_keys()]


command = Command("list", _show, HELP, takes_paths=True, offers=_offers)


def show(word: str | None = None, config_dirs: Sequence[str] = ()) -> None:
    """Print the options of all groups or of one, a line each, or one option with its keys. Raises UserError."""
    of_plugins = plugins.problems()
    refuse(problem for problem in catalog.problems(config_dirs) if problem not in of_plugins)
    for problem in of_plugins:  # the other options still exist
        logger.warning("%s", problem)
    groups = catalog.option_files(config_dirs)
    group, _, option = (word or "").partition("=")
    if word is not None and group not in groups:
        echo(_of_no_group(group, config_dirs))
    elif option:
        if option not in groups[group]:
            raise UserError(f"{word} is no option of {group}: {suggestion(str(word), option, groups[group])}")
        _show_option(group, option, groups[group][option])
    else:
        Table(("group", "option", "effect", "what it does"), [
            (name if first else "", option, _claim(file)[0], catalog.summary(file))
            for name, files in groups.items() if word is None or name == group
            for first, (option, file) in zip([True] + [False] * len(files), files.items(), strict=False)
        ]).show()  # fmt: skip
        echo("\n".join(f"{name}: {line}" for name in groups if name == group or word is None if (line := several(name))))
        echo(f"drivetrain list {group or 'GROUP'}=OPTION shows one with its keys")


def names(config_dirs: Sequence[str] = ()) -> str:
    """A line for each group with the names of its options, the default ones first."""
    chosen = {group: option if isinstance(option, list) else [option] for group, option in catalog.default_options().items()}
    lines = [
        f"  {group:<20}  {', '.join(sorted(files, key=lambda name: name not in chosen[group]))}"
        for group, files in catalog.option_files(config_dirs).items()
    ]
    return "\n".join(["groups and their options, the default first (what they do: drivetrain list GROUP)", "", *lines])


def _of_no_group(word: str, config_dirs: Sequence[str]) -> str:
    """The description of a key of the whole config. Raises UserError without a key of this name."""
    keys, groups = catalog.root_keys(), catalog.option_files(config_dirs)
    if word in keys:
        return f"{word} is a key of the whole config, not a group: {keys[word]}"
    if of := [name for name, files in groups.items() if word in files]:
        raise UserError(f"there is no group '{word}': {word} is an option: `drivetrain list {of[0]}={word}` shows it")
    key = word.rpartition(".")[2]
    having = [f"{name}={option}" for name, of in catalog.owners(config_dirs).get(key, {}).items() for option in of]
    homes = " and ".join(dict.fromkeys(each.partition("=")[0] for each in having))
    hint = f"{key} is a key of {homes}: `drivetrain list {having[0]}` has it" if having else ""
    raise UserError(f"there is no group '{word}': {hint or did_you_mean(word, [*groups, *keys])}")


def _show_option(group: str, option: str, file: Path) -> None:
    """Print one option: its description, its use, its claimed effect on training, and its keys."""
    effect, changes = _claim(file, plugins.trusted_packages())
    keys = catalog.key_lines(file)
    place = f"{group}.{option}" if group in catalog.LISTS else group
    override = f"{group}={f'[{option}]' if group in catalog.LISTS else option}"
    package = catalog.target(file).partition(".")[0]
    not_read = f"its code is not imported here: see drivetrain show {override} 'trust=[{package}]' --config-dir …"
    echo(f"{override}: {catalog.summary(file)}")
    echo("".join(f"    {name}: {text}\n" for name, text in (
        ("when", catalog.when(file)), ("effect", f"{effect}{f' ({changes})' if changes else ''}" if effect != "–" else not_read),
        *((f"measured{words.removeprefix(override)}", said) for words, said in catalog.measured().items()
          if effect != "–" and words.partition(" ")[0] == override),
    ) if text))  # fmt: skip
    # Indented lines are the entries of a mapping, such as a task's settings.
    echo("\n".join(f"    {key}" if key.startswith(" ") else f"    {place}.{key}" for key in keys))
    if line := several(group):
        echo(line)


def several(group: str) -> str:
    """The way to choose several options of a group at once; "" for a group of one."""
    if group in catalog.SUMS:
        return f"'{group}=[a,b]' adds up several, with '{group}.weights=[1,0.5]' and {group}.a.key=value"
    return f"'{group}=[a,b]' takes several, '{group}=[]' none" if group in catalog.LISTS else ""


def _claim(file: Path, trusted: Collection[str] = ()) -> tuple[str, str]:
    """An option's claimed effect on training, and its changes; a dash if its code is neither shipped nor of these packages."""
    target = catalog.target(file)
    if target not in catalog.shipped_targets() and target.partition(".")[0] not in trusted:
        return "–", ""
    try:
        option: Option = import_name(target)()
    except Exception as error:  # the plugin's module may raise anything
        logger.warning("%s cannot be imported: %s: %s", target, type(error).__name__, error)
        return "–", ""
    effect = option.effect_as_set()
    return effect, option.changes if effect != "exact" else ""

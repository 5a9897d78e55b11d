"""`drivetrain list`: the options there are, and what each does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from drivetrain.cli import arguments
from drivetrain.config import catalog, plugins
from drivetrain.core.errors import DONE, UserError, did_you_mean
from drivetrain.core.option import Option
from drivetrain.core.user_code import import_name
from drivetrain.ui.output import echo
from drivetrain.ui.sheet import Table

logger = logging.getLogger(__name__)

HELP = """\
drivetrain list [GROUP]      every option of every group with what it does; of one group, every knob too
drivetrain list KEY          what a key of no group does, such as target, stages or epochs

`effect` is what an option claims of training: exact, the same numbers as without it; close, the same mathematics, rounded or
summed otherwise; changes, another run. `drivetrain compare` tests the claim.

  -cd, --config-dir DIR your own options too: DIR/<group>/<option>.yaml

Options of installed plugins are among them: see drivetrain/config/plugins.py.
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain list`; its exit code."""
    if (given := arguments.parse("list", argv, HELP)) is None:
        return DONE
    if len(given.overrides) > 1:
        raise UserError(f"drivetrain list shows one group at a time: leave out {' '.join(given.overrides[1:])}")
    show(given.overrides[0] if given.overrides else None, given.config_dir)
    return DONE


def complete(words: Sequence[str], last: str) -> Sequence[str]:
    """What TAB offers after `drivetrain list`: the groups, and the keys of no group."""
    return [*catalog.options(), *catalog.root_keys()]


def show(group: str | None = None, config_dirs: Sequence[str] = ()) -> None:
    """Print every option with its line; of one group, every knob too. Raises UserError for an unknown name or a wrong file."""
    of_plugins = plugins.problems()
    if problems := [problem for problem in catalog.problems(config_dirs) if problem not in of_plugins]:
        raise UserError(problems)
    for problem in of_plugins:  # the other options are there all the same
        logger.warning("%s", problem)
    groups = catalog.option_files(config_dirs)
    if group is None:
        Table(("group", "option", "effect", "what it does"), [
            (name if first else "", option, _claim(file)[0], catalog.summary(file))
            for name, files in groups.items()
            for first, (option, file) in zip([True] + [False] * len(files), files.items(), strict=False)
        ]).show()  # fmt: skip
        echo("\n".join(f"{name}: {line}" for name in groups if (line := several(name))))
        return
    if group not in groups:
        keys = catalog.root_keys()
        if group not in keys:
            knob = group.rpartition(".")[2]
            having = [name for name in groups if any(knob in catalog.option_keys(name, o, config_dirs) for o in groups[name])]
            hint = f"{knob} is a key of {' and '.join(having)}: `drivetrain list {having[0]}` has it" if having else ""
            raise UserError(f"there is no group '{group}': {hint or did_you_mean(group, [*groups, *keys])}")
        echo(f"{group} is a key of the whole config, and no group: {keys[group]}")
        return
    for option, file in groups[group].items():
        knobs = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith(("#", "_target_"))]
        echo(f"{group}={option}: {catalog.summary(file)}")
        if when := catalog.when(file):
            echo(f"    when: {when}")
        effect, changes = _claim(file)
        if effect != "–":
            echo(f"    effect: {effect}{f' ({changes})' if changes else ''}")
        # Indented lines are the entries of a mapping, such as what a task sets.
        echo("".join(f"    {knob}\n" if knob.startswith(" ") else f"    {group}.{knob}\n" for knob in knobs))
    if line := several(group):
        echo(line)


def several(group: str) -> str:
    """How several options of a group are chosen at once; "" where it takes one."""
    if group in catalog.SUMS:
        return f"'{group}=[a,b]' adds up several, with '{group}.weights=[1,0.5]' and {group}.a.key=value"
    return f"'{group}=[a,b]' takes several, '{group}=[]' none" if group in catalog.LISTS else ""


def _claim(file: Path) -> tuple[str, str]:
    """What an option claims of training, and what it changes; a dash for a plugin's, whose code a list does not import."""
    target = catalog.target(file)
    if target not in catalog.shipped_targets():
        return "–", ""
    option: Option = import_name(target)()
    effect = option.effect_as_set()
    return effect, option.changes if effect != "exact" else ""

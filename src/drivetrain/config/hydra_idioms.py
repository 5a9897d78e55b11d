"""What Hydra's users type, in drivetrain's words; or, where drivetrain has no such thing, the word to type instead."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from drivetrain.config.catalog import EXPERIMENTS, LISTS, options
from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.overrides import format_value, key_of, parse
from drivetrain.recipe import places

HONOURED: dict[str, Any] = {  # keys below `hydra.` that a run or a sweep obeys, with what they take
    "run.dir": str,
    "sweep.dir": str,
    "sweep.subdir": str,
    "output_subdir": str | None,
    "mode": Literal["RUN", "MULTIRUN"] | None,
    "job.name": str,
    "job.chdir": Literal[False] | None,
    "job.config.override_dirname.kv_sep": str,
    "job.config.override_dirname.item_sep": str,
    "job.config.override_dirname.exclude_keys": list[str],
}
_INSTEAD = {  # the start of a key → what to type
    "hydra.run.dir": "it is for one run by `drivetrain train`: set output_dir=… here",
    "hydra.mode": "it is for several runs: say -m before it, or leave it out",
    "hydra.sweep.": "it is for several runs: say -m before it, or leave it out",
    "hydra.launcher": "it is for several runs: say -m before it, or leave it out",
    "hydra.sweeper": "it is for several runs: say -m before it, or leave it out",
    "hydra.job.chdir": "a run stays in the working directory: set output_dir=… or hydra.run.dir=… for what it leaves",
    "hydra.job.env": "set a variable before the command, as NAME=value drivetrain train …",
    "hydra.env": "set a variable before the command, as NAME=value drivetrain train …",
    "hydra.job.config": "of these drivetrain has hydra.job.config.override_dirname.kv_sep, item_sep and exclude_keys",
    "hydra.job_logging": "messages go to the terminal and to log.txt: say -q for warnings only, logger=[…] for figures",
    "hydra.hydra_logging": "messages go to the terminal and to log.txt: say -q for warnings only, logger=[…] for figures",
    "hydra.verbose": "log.txt holds every message: say -q for warnings only, or look into a run by debug=…",
    "hydra.callbacks": "drivetrain starts runs itself, so Hydra's are never called: name yours by callbacks=[my_pkg.MyCallback]",
    "hydra.searchpath": "give a folder with your own options by --config-dir FOLDER",
    "hydra.help": "say `drivetrain train --help`",
    "hydra.hydra_help": "say `drivetrain train --help`",
    "hydra.runtime": "it says what Hydra found, and cannot be set",
    "hydra.job.": "it says what Hydra found, and cannot be set: a job's name is hydra.job.name=…",
}
OFF = ("none", "single", "fixed", "constant")  # names of options that switch a group off


def instead(override: str) -> str:
    """Why drivetrain does not take this word of Hydra's own config, and what to type."""
    key = key_of(override).replace("/", ".")
    hint = next((hint for start, hint in _INSTEAD.items() if key.startswith(start)), None)
    near = did_you_mean(key, [f"hydra.{name}" for name in HONOURED])
    return f"'{override}': {hint or f'drivetrain does not start runs by Hydra and has no such setting: {near}'}"


def is_hydra_override(override: str) -> bool:
    """Whether an override sets Hydra's own config and not the run's."""
    return re.split(r"[./=@]", key_of(override))[0] == "hydra"


def translated(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> list[str]:
    """The overrides with Hydra's idioms in drivetrain's words; those without a meaning here stay, and composing refuses them.

    `experiment=NAME` is a recipe, also of a config dir's experiment/; `~GROUP` is its off switch; `GROUP@GROUP=x` is `GROUP=x`;
    `GROUP=glob(a*)` lists the options that match. Raises UserError where none does.
    """
    groups = options(config_dirs)
    return [_translated(override, groups, config_dirs) for override in overrides]


def _translated(override: str, groups: Mapping[str, Sequence[str]], config_dirs: Sequence[str]) -> str:
    key, equals, value = override.partition("=")
    name, _, package = key.lstrip("+").partition("@")
    if value.startswith("glob(") and (known := groups.get(name) or _files(name, config_dirs)):
        value = ",".join(_matching(override, known))
        override = f"{key}={value}"
    if name == "experiment" and equals:
        return "recipe=" + ",".join(recipe_word(each, config_dirs) for each in value.split(","))
    if package and package == name and name in groups:
        return f"{name}={value}"
    if override.startswith("~") and override[1:] in groups and (off := off_switch(override[1:], groups)):
        return off
    return override


def _files(key: str, config_dirs: Sequence[str]) -> list[str]:
    """The names that `recipe=` or `experiment=` takes; none for any other key."""
    own = [file.stem for folder in config_dirs for file in sorted(Path(folder, EXPERIMENTS).glob("*.yaml"))]
    return own if key == "experiment" and own else places.names() if key in ("experiment", "recipe") else []


def _matching(override: str, known: Sequence[str]) -> list[str]:
    """The known names that the glob of an override matches. Raises UserError."""
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    try:
        glob = parse(override).value()
    except HydraException:
        glob = None
    found = glob.filter(list(known)) if isinstance(glob, Glob) else []
    if not found:
        raise UserError(f"'{override}' matches nothing: there is: {', '.join(known)}")
    return found


def off_switch(group: str, groups: Mapping[str, Sequence[str]]) -> str | None:
    """The override that switches a group off; None where it has no such option."""
    if group in LISTS:
        return f"{group}=[]"
    return next((f"{group}={name}" for name in OFF if name in groups[group]), None)


def recipe_word(name: str, config_dirs: Sequence[str] = ()) -> str:
    """What `recipe=` takes for the name of an experiment or a config: a file of a config dir comes before recipes that ship."""
    plain = name.strip("'\"")
    for folder in config_dirs:
        for file in (Path(folder, EXPERIMENTS, f"{plain}.yaml"), Path(folder, f"{plain.removesuffix('.yaml')}.yaml")):
            if file.is_file():
                return format_value(str(file))
    return name

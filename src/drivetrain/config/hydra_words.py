"""The words of Hydra's users: its idioms in drivetrain's words, its settings that hold here, and the words to type instead."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drivetrain.config.catalog import EXPERIMENTS, LISTS, options
from drivetrain.config.composed import Composed
from drivetrain.config.schema import Schema
from drivetrain.core.errors import UserError, did_you_mean, refuse
from drivetrain.core.options.overrides import format_value, key_of, parse, redact, single_values
from drivetrain.core.typed import JsonObject
from drivetrain.recipe import places

ELSEWHERE = "it is for several runs: say -m before it, or leave it out"
VARIABLE = "set a variable before the command, as NAME=value drivetrain train …"
MESSAGES = "messages go to the terminal and to log.txt: say -q for warnings only, logger=[…] for figures"
HELP = "say `drivetrain train --help`"
DIRNAME = "of these drivetrain has hydra.job.config.override_dirname.kv_sep, item_sep and exclude_keys"
FOUND = "it says what Hydra found, and cannot be set"
NOT_TAKEN = object()
# Keys below `hydra.`, or what they begin with → what a run or a sweep takes there, and what to type where it does not.
WORDS: dict[str, tuple[Any, str]] = {
    "run.dir": (str, "it is for one run by `drivetrain train`: set output_dir=… here"),
    "sweep.dir": (str, ELSEWHERE),
    "sweep.subdir": (str, ELSEWHERE),
    "output_subdir": (str | None, ""),
    "mode": (Literal["RUN", "MULTIRUN"] | None, ELSEWHERE),
    "job.name": (str, f"{FOUND}: a job's name is hydra.job.name=…"),
    "job.chdir": (
        Literal[False] | None,
        "a run stays in the working directory: set output_dir=… or hydra.run.dir=… for what it leaves",
    ),
    "job.config.override_dirname.kv_sep": (str, DIRNAME),
    "job.config.override_dirname.item_sep": (str, DIRNAME),
    "job.config.override_dirname.exclude_keys": (list[str], DIRNAME),
    "sweep.": (NOT_TAKEN, ELSEWHERE),
    "launcher": (NOT_TAKEN, ELSEWHERE),
    "sweeper": (NOT_TAKEN, ELSEWHERE),
    "job.env": (NOT_TAKEN, VARIABLE),
    "env": (NOT_TAKEN, VARIABLE),
    "job.config": (NOT_TAKEN, DIRNAME),
    "job_logging": (NOT_TAKEN, MESSAGES),
    "hydra_logging": (NOT_TAKEN, MESSAGES),
    "verbose": (NOT_TAKEN, "log.txt holds every message: say -q for warnings only, or look into a run by debug=…"),
    "callbacks": (
        NOT_TAKEN,
        "drivetrain starts runs itself, so Hydra's are never called: name yours by callbacks=[my_pkg.MyCallback]",
    ),
    "searchpath": (NOT_TAKEN, "give a folder with your own options by --config-dir FOLDER"),
    "help": (NOT_TAKEN, HELP),
    "hydra_help": (NOT_TAKEN, HELP),
    "runtime": (NOT_TAKEN, FOUND),
    "job.": (NOT_TAKEN, f"{FOUND}: a job's name is hydra.job.name=…"),
}
HONOURED = {key: takes for key, (takes, _) in WORDS.items() if takes is not NOT_TAKEN}
OFF = ("none", "single", "fixed", "constant")  # names of options that switch a group off


def instead(override: str) -> str:
    """The reason why drivetrain does not take this word of Hydra's own config, and what to type."""
    key = key_of(override).replace("/", ".").removeprefix("hydra.")
    hint = next((hint for start, (_, hint) in WORDS.items() if key.startswith(start)), "")
    near = did_you_mean(f"hydra.{key}", [f"hydra.{name}" for name in HONOURED])
    return f"'{override}': {hint or f'drivetrain does not start runs by Hydra and has no such setting: {near}'}"


def is_hydra_override(override: str) -> bool:
    """True if an override sets Hydra's own config and not the run's."""
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
    """The word that `recipe=` takes for the name of an experiment or a config: a config dir's file before shipped recipes."""
    plain = name.strip("'\"")
    for folder in config_dirs:
        for file in (Path(folder, EXPERIMENTS, f"{plain}.yaml"), Path(folder, f"{plain.removesuffix('.yaml')}.yaml")):
            if file.is_file():
                return format_value(str(file))
    return name


@dataclass(frozen=True)
class HydraSettings:
    """The settings that were typed of Hydra's own config for a run or a sweep. Its texts may refer to the config, as in Hydra."""

    given: JsonObject = field(default_factory=dict)  # key below `hydra.` → value
    typed: tuple[str, ...] = ()
    number: int | None = None  # of the job in its sweep

    @property
    def folder(self) -> str | None:
        """The folder for Hydra's files beside a run's own; None: it is not wanted."""
        folder: str | None = self.given.get("output_subdir", ".hydra")
        return folder

    def check_one_run(self) -> None:
        """Raise UserError for settings of a sweep, which a single run would ignore."""
        if wrong := [word for word in self.typed if word.startswith(("hydra.sweep.", "hydra.mode=MULTIRUN"))]:
            raise UserError(map(instead, wrong))

    def path(self, key: str, composed: Composed) -> Path | None:
        """The path that `hydra.KEY` stands for in this run; None where it is not set. Raises UserError."""
        return None if key not in self.given else Path(os.path.expanduser(self._resolved(key, composed)))

    def _resolved(self, key: str, composed: Composed) -> str:
        text = re.sub(r"\$\{hydra:", "${hydra.", self.given[key])
        if "${" not in text:
            return text
        whole = self.whole(composed)
        whole["_text"] = text
        try:
            return str(whole["_text"])
        except OmegaConfBaseException as error:
            raise UserError(f"hydra.{key}={text}: it cannot be resolved: {str(error).splitlines()[0]}") from None

    def node(self, composed: Composed, run_dir: Path | None = None) -> JsonObject:
        """Hydra's config node of this run, under Hydra's names: what other tools read from hydra.yaml."""
        from hydra import __version__ as version

        number, dirs = self.number, [f"file://{Path(folder).resolve()}" for folder in composed.config_dirs]
        node: JsonObject = {
            "run": {"dir": "${output_dir}/${now:%Y-%m-%d}/${now:%H-%M-%S}-<id>"},
            "sweep": {"dir": "${output_dir}/multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}-<id>", "subdir": "${hydra.job.num}"},
            "mode": "RUN" if number is None else "MULTIRUN",
            "searchpath": dirs,
            "output_subdir": ".hydra",
            "overrides": {"hydra": [*self.typed], "task": [redact(word) for word in composed.overrides]},
            "job": {
                "name": "drivetrain", "chdir": False, "override_dirname": "", "id": "0" if number is None else str(number),
                "num": number or 0, "config_name": "config", "env_set": {}, "env_copy": [],
                "config": {"override_dirname": {"kv_sep": "=", "item_sep": ",", "exclude_keys": []}},
            },
            "runtime": {
                "version": version, "version_base": "1.3", "cwd": os.getcwd(), "choices": composed.choices,
                "output_dir": "???" if run_dir is None or self._is_secret(composed) else str(run_dir.absolute()),
            },
            "verbose": False,
        }  # fmt: skip
        for key, value in self.given.items():
            *above, last = key.split(".")
            reduce(getitem, above, node)[last] = value
        node["job"]["override_dirname"] = _dirname(composed.overrides, **node["job"]["config"]["override_dirname"])
        return node

    def _is_secret(self, composed: Composed) -> bool:
        """True if the run's directory was named by the environment, of which nothing is written."""
        named = (self.given.get(key, "") for key in ("run.dir", "sweep.dir", "sweep.subdir"))
        return any("${oc.env" in text for text in named) or composed.from_environment("output_dir")

    def whole(self, composed: Composed) -> DictConfig:
        """The run's config and Hydra's node below `hydra`, as Hydra shows them."""
        return OmegaConf.create({**composed.unresolved, "hydra": self.node(composed)})


def _dirname(overrides: Sequence[str], kv_sep: str, item_sep: str, exclude_keys: Sequence[str]) -> str:
    """The overrides as one name of a folder, sorted by key, as Hydra writes it; a slash in a value becomes an underscore."""
    words = sorted((redact(word).lstrip("+") for word in overrides), key=key_of)
    kept = [word.partition("=") for word in words if key_of(word) not in exclude_keys]
    return item_sep.join(f"{key}{kv_sep}{value}" for key, _, value in kept).replace("/", "_")


def split(overrides: Sequence[str]) -> tuple[HydraSettings, list[str]]:
    """Hydra's settings that hold here, and the other overrides. Raises UserError for a value that a setting does not take."""
    own = [o for o in overrides if key_of(o).removeprefix("hydra.") in HONOURED and key_of(o).startswith("hydra.")]
    problems: list[str] = []
    given = {key.removeprefix("hydra."): value for key, value in single_values(own, "run", problems).items()}
    if given.get("job.chdir"):
        problems.append(instead("hydra.job.chdir=true"))
    else:
        problems += Schema("Hydra", HONOURED).problems("hydra", given)
    refuse(problems)
    return HydraSettings(given, tuple(own)), [o for o in overrides if o not in own]

"""Hydra's words: its idioms as drivetrain's overrides, the settings that work here, and the words to type instead of others."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drivetrain.config.catalog import EXPERIMENTS, LISTS, options
from drivetrain.config.composed import Composed
from drivetrain.config.schema import Schema
from drivetrain.core.errors import UserError, did_you_mean, refuse
from drivetrain.core.options.overrides import format_value, key_of, parse, redact, single_values
from drivetrain.core.typed import JsonObject

HONOURED = {"run.dir": str, "sweep.dir": str, "sweep.subdir": str, "job.name": str}  # keys below `hydra.` that work here
OFF = ("none", "single", "fixed", "constant")  # names of options that switch a group off


def instead(override: str) -> str:
    """The answer to a setting of Hydra's own config that does not work here."""
    near = did_you_mean(key_of(override), [f"hydra.{name}" for name in HONOURED])
    return (
        f"'{override}': drivetrain starts runs itself, and of Hydra's settings it takes hydra.run.dir for one run by "
        "`drivetrain train`, and behind -m hydra.sweep.dir, hydra.sweep.subdir, hydra/launcher and hydra/sweeper; hydra.job.name "
        f"for both: {near}. `drivetrain train --help` has what to type for the others"
    )


def is_hydra_override(override: str) -> bool:
    """True if an override sets Hydra's config, not the run's."""
    return re.split(r"[./=@]", key_of(override))[0] == "hydra"


def translated(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> list[str]:
    """The overrides with Hydra's idioms in drivetrain's words; those without a meaning here stay, and `compose` refuses them.

    `experiment=NAME` is a recipe, also of a config dir's experiment/; `~GROUP` is its off switch; `GROUP=glob(a*)` lists the
    options that match. Raises UserError where none does.
    """
    groups = options(config_dirs)
    return [_translated(override, groups, config_dirs) for override in overrides]


def _translated(override: str, groups: Mapping[str, Sequence[str]], config_dirs: Sequence[str]) -> str:
    key, equals, value = override.partition("=")
    name = key.lstrip("+")
    if value.startswith("glob(") and (known := groups.get(name)):
        value = ",".join(_matching(override, known))
        override = f"{key}={value}"
    if name == "experiment" and equals:
        return "recipe=" + ",".join(recipe_word(each, config_dirs) for each in value.split(","))
    if override.startswith("~") and override[1:] in groups and (off := off_switch(override[1:], groups)):
        return off
    return override


def _matching(override: str, known: Sequence[str]) -> list[str]:
    """The known names that the glob of an override matches. Raises UserError."""
    from hydra.errors import HydraException

    from drivetrain.core.options.hydra_parts import parsed

    try:
        glob = parse(override).value()
    except HydraException:
        glob = None
    found = glob.filter(list(known)) if isinstance(glob, parsed.Glob) else []
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
    """The typed settings of Hydra's own config for a run or a sweep. Its texts may refer to the config, as in Hydra."""

    given: JsonObject = field(default_factory=dict)  # key below `hydra.` → value
    typed: tuple[str, ...] = ()
    number: int | None = None  # of the job in its sweep

    def check_one_run(self) -> None:
        """Raise UserError for settings of a sweep, which a single run would ignore."""
        if wrong := [word for word in self.typed if word.startswith("hydra.sweep.")]:
            raise UserError(f"'{word}' is for several runs: say -m before it, or leave it out" for word in wrong)

    def path(self, key: str, composed: Composed) -> Path | None:
        """The path that `hydra.KEY` sets for this run; None without one. Raises UserError."""
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
        """Hydra's config node of this run, under Hydra's names, as other tools read it from hydra.yaml."""
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
                "name": "drivetrain", "chdir": False, "override_dirname": _dirname(composed.overrides),
                "id": "0" if number is None else str(number),
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
        return node

    def _is_secret(self, composed: Composed) -> bool:
        """True if the environment names the run's directory; records never hold the environment."""
        named = (self.given.get(key, "") for key in ("run.dir", "sweep.dir", "sweep.subdir"))
        return any("${oc.env" in text for text in named) or composed.from_environment("output_dir")

    def whole(self, composed: Composed) -> DictConfig:
        """The run's config and Hydra's node below `hydra`, as Hydra shows them."""
        return OmegaConf.create({**composed.unresolved, "hydra": self.node(composed)})


def _dirname(overrides: Sequence[str]) -> str:
    """The overrides as one name of a folder, sorted by key, as Hydra writes it; a slash in a value becomes an underscore."""
    return ",".join(sorted((redact(word).lstrip("+") for word in overrides), key=key_of)).replace("/", "_")


def split(overrides: Sequence[str]) -> tuple[HydraSettings, list[str]]:
    """Hydra's settings that work here, and the other overrides. Raises UserError for a wrong value of a setting."""
    own = [o for o in overrides if key_of(o).removeprefix("hydra.") in HONOURED and key_of(o).startswith("hydra.")]
    problems: list[str] = []
    given = {key.removeprefix("hydra."): value for key, value in single_values(own, "run", problems).items()}
    refuse([*problems, *Schema("Hydra", HONOURED).problems("hydra", given)])
    return HydraSettings(given, tuple(own)), [o for o in overrides if o not in own]

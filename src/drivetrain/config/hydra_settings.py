"""Hydra's own settings that hold here, such as hydra.run.dir, and its config node as other tools read it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drivetrain.config.compose import Composed
from drivetrain.config.hydra_idioms import HONOURED, instead
from drivetrain.config.values import type_problems
from drivetrain.core.errors import UserError
from drivetrain.core.overrides import key_of, redact, single_values


@dataclass(frozen=True)
class HydraSettings:
    """What was typed of Hydra's own config for a run or a sweep. Its texts may refer to the config, as in Hydra."""

    given: dict[str, Any] = field(default_factory=dict)  # key below `hydra.` → value
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

    def node(self, composed: Composed, run_dir: Path | None = None) -> dict[str, Any]:
        """Hydra's config node of this run, under Hydra's names: what other tools read from hydra.yaml."""
        from hydra import __version__ as version

        number, dirs = self.number, [f"file://{Path(folder).resolve()}" for folder in composed.config_dirs]
        node: dict[str, Any] = {
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
        """Whether the run's directory was named by the environment, of which nothing is written."""
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
        problems += type_problems("hydra", {key: (HONOURED[key], value) for key, value in given.items()})
    if problems:
        raise UserError(problems)
    return HydraSettings(given, tuple(own)), [o for o in overrides if o not in own]

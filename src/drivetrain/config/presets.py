"""What a task sets: options and values that hold where neither a recipe nor the command line sets them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from drivetrain.config.catalog import default_options, option_files


@dataclass(frozen=True)
class Preset:
    """The options and the values of one task, from the mapping `preset` of its file."""

    choices: Mapping[str, Any]  # group → option
    values: Mapping[str, Any]  # dotted key → value

    def values_for(self, choices: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that hold for these options: a group's, if its option is the one that the task was written for."""
        written_for = {**default_options(), **self.choices}
        return {k: v for k, v in self.values.items() if choices.get(g := k.split(".")[0]) == written_for.get(g)}


def read(task: Any, groups: Container[str], config_dirs: Sequence[str] = ()) -> Preset:
    """Return the preset of a task; an empty one where there is no such task."""
    file = option_files(config_dirs).get("task", {}).get(str(task))
    given = (yaml.safe_load(file.read_text(encoding="utf-8")).get("preset") or {}) if file is not None else {}
    return Preset({k: v for k, v in given.items() if k in groups}, {k: v for k, v in given.items() if k not in groups})

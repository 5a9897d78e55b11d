"""`drivetrain list`: what there is, with what it buys."""

from __future__ import annotations

from pathlib import Path

from drivetrain.config.compose import options
from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.paths import conf_dir
from drivetrain.ui.terminal import table


def line_of(file: Path) -> str:
    """The first comment of an option's YAML: what the option buys."""
    comments = (line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#"))
    return next((c for c in comments if not c.startswith("@package")), "")


def show(group: str | None = None) -> None:
    """Every option with its line; of one group, every knob too. Raises UserError for a group there is not."""
    groups = options()
    if group is None:
        table(("group", "option", "what it buys"), [
            (g if first else "", name, line_of(conf_dir() / g / f"{name}.yaml"))
            for g, names in groups.items() for first, name in zip([True] + [False] * len(names), names, strict=False)
        ])  # fmt: skip
        return
    if group not in groups:
        raise UserError(f"there is no group '{group}': {did_you_mean(group, groups)}")
    for name in groups[group]:
        text = (conf_dir() / group / f"{name}.yaml").read_text()
        knobs = [line for line in text.splitlines() if not line.startswith(("#", "_target_"))]
        print(f"{group}={name}: {line_of(conf_dir() / group / f'{name}.yaml')}")
        print("".join(f"    {group}.{knob}\n" for knob in knobs))

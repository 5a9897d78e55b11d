"""Changes a run's overrides: applies some on top of others, and drops those that no longer apply."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.config.catalog import LISTS, option_keys, options
from drivetrain.core.option import RunSpec
from drivetrain.core.overrides import key_of


def groups_of(overrides: Sequence[str]) -> set[str]:
    """The config groups that these overrides touch."""
    return {key_of(override).split(".")[0] for override in overrides}


def apply(overrides: Sequence[str], changes: Sequence[str], config_dirs: Sequence[str] = ()) -> list[str]:
    """Apply `changes` on top of `overrides`: a change replaces its key, and a new option drops keys that it does not have."""
    return [*unchanged(overrides, changes, config_dirs), *changes]


def unchanged(overrides: Sequence[str], changes: Sequence[str], config_dirs: Sequence[str] = ()) -> list[str]:
    """The overrides that still apply after `changes`."""
    groups = options(tuple(config_dirs))
    keys = {key_of(change) for change in changes}
    chosen = {key_of(c): c.partition("=")[2] for c in changes if key_of(c) in groups and key_of(c) not in LISTS}

    def applies(override: str) -> bool:
        group, _, key = key_of(override).partition(".")
        if key_of(override) in keys:
            return False
        return not key or group not in chosen or key.split(".")[0] in option_keys(group, chosen[group], config_dirs)

    return [override for override in overrides if applies(override)]


def with_channels_last(run: RunSpec) -> list[str]:
    """The override that adds channels_last to the run's edits of the model; none where it is among them or has no effect."""
    edits = run.names("surgery")
    return [] if "channels_last" in edits or not run.model.may_convolve else [f"surgery=[{','.join([*edits, 'channels_last'])}]"]

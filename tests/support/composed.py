"""Configs put together from sections: Hydra takes 0.2 s to compose a config, and the tests of a worker ask for hundreds.

`install()` makes Hydra compose each option of a group once in a process. A config with several of them is then the default
config with their sections. Commands that run as processes of their own have every config composed by Hydra as a whole.
"""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from pathlib import Path

from omegaconf import DictConfig, open_dict

from drivetrain.config import compose
from drivetrain.config.catalog import default_options

by_hydra = compose._hydra_compose.__wrapped__
_compose_once = lru_cache(maxsize=512)(by_hydra)


def install() -> None:
    """Let `drivetrain.config.compose` put its configs together from sections."""
    compose._hydra_compose = from_sections  # type: ignore[assignment]


def from_sections(overrides: tuple[str, ...], folders: tuple[Path, ...]) -> DictConfig:
    """Return what Hydra composes from these overrides, one for each group."""
    default = _compose_once((), folders)
    sections = {key: default._get_node(key) for key in default}
    if several := tuple(override for override in overrides if override[0] in "~+"):  # loss=[a,b]
        sections[several[0][1:]] = _compose_once(several, folders)._get_node(several[0][1:])
    for override in (override for override in overrides if override not in several):
        group = override.partition("=")[0]
        composed = _compose_once((override,), folders)
        sections[group] = composed._get_node(group) if group in composed else None
    order = [*default_options(), *default]  # the groups, then the other keys
    config = deepcopy(default)
    with open_dict(config):
        config.clear()
        for key in dict.fromkeys(order):
            if sections.get(key) is not None:  # a list without options has no section
                config[key] = sections[key]
    return config

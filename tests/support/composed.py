"""Configs put together from the options' files: Hydra takes 0.2 s to compose one, and the tests of a worker ask for hundreds.

`install()` makes Hydra compose the default config once in a process. A config with other options is then the default config
with the contents of their files; `tests/config/test_compose.py` compares the two. Commands that start python themselves
(`own_process`) have every config composed by Hydra as a whole.
"""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from drivetrain.config import compose
from drivetrain.config.catalog import LISTS, default_options
from drivetrain.core.paths import conf_dir

by_hydra = compose._hydra_compose.__wrapped__
_compose_once = lru_cache(maxsize=64)(by_hydra)


def install() -> None:
    """Let `drivetrain.config.compose` put its configs together from sections."""
    compose._hydra_compose = lru_cache(maxsize=64)(from_sections)  # as the real one: whoever asks makes a copy


def from_sections(overrides: tuple[str, ...], folders: tuple[Path, ...]) -> DictConfig:
    """Return what Hydra composes from these overrides, one for each group."""
    default = _default(folders)
    sections = {key: default._get_node(key) for key in default}
    if several := tuple(override for override in overrides if override[0] in "~+"):  # loss=[a,b]
        sections[several[0][1:]] = _compose_once(several, folders)._get_node(several[0][1:])
    for override in (override for override in overrides if override not in several):
        group, _, option = override.partition("=")
        sections[group] = _section(group, option, folders)
    order = [*default_options(), *default]  # the groups, then the other keys
    config = _empty(folders)
    for key in dict.fromkeys(order):
        if sections.get(key) is not None:  # a list without options has no section
            config._set_item_impl(key, deepcopy(sections[key]))
    OmegaConf.set_struct(config, True)
    return config


@lru_cache(maxsize=64)
def _default(folders: tuple[Path, ...]) -> DictConfig:
    return _compose_once((), folders)


def _empty(folders: tuple[Path, ...]) -> DictConfig:
    config = deepcopy(_bare(folders))
    OmegaConf.set_struct(config, False)
    return config


@lru_cache(maxsize=64)
def _bare(folders: tuple[Path, ...]) -> DictConfig:
    """The config as Hydra composes it, without any value."""
    config = deepcopy(_default(folders))
    with open_dict(config):
        config.clear()
    return config


@lru_cache(maxsize=1024)
def _section(group: str, option: str, folders: tuple[Path, ...]) -> DictConfig | None:
    """The values of an option, or of those of a list below their names; None without an option."""
    if group not in LISTS:
        return OmegaConf.create(_values(group, option, folders))
    names = [name.strip() for name in option.strip("[]").split(",") if name.strip()]
    return OmegaConf.create({name: _values(group, name, folders) for name in names}) if names else None


@lru_cache(maxsize=1024)
def _values(group: str, option: str, folders: tuple[Path, ...]) -> Any:
    files = (folder / group / f"{option}.yaml" for folder in (conf_dir(), *folders))
    own: Any = OmegaConf.to_container(OmegaConf.load(next(file for file in files if file.is_file())))
    shared = [_values(group, name, folders) for name in own.pop("defaults", []) if name != "_self_"]
    return {key: value for each in (*shared, own) for key, value in each.items()}

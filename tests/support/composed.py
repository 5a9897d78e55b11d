"""Configs put together from the options' files: Hydra takes 0.2 s to compose one, and the tests of a worker ask for hundreds.

`install()` makes Hydra compose the default config once in a process. A config with other options is then the default config
with the contents of their files; `tests/config/test_compose.py` compares the two. Commands that start python themselves
(`own_process`) have every config composed by Hydra as a whole.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from drivetrain.config import compose
from drivetrain.config.catalog import LISTS, default_options, options
from drivetrain.core.machine.paths import conf_dir
from drivetrain.core.typed import JsonObject

by_hydra = compose._hydra_compose.__wrapped__


def install() -> None:
    """Let `drivetrain.config.compose` put its configs together from sections."""
    compose._hydra_compose = from_sections


def read_all() -> None:
    """Read the files of all options, once before a process forks."""
    for group, names in options().items():
        for name in names:
            _values(group, name, ())


@lru_cache(maxsize=256)
def from_sections(overrides: tuple[str, ...], folders: tuple[Path, ...]) -> JsonObject:
    """Return what Hydra composes from these overrides, one for each group, or one for each of several options of a group."""
    sections = dict(_default())
    for override in overrides:
        group, _, option = override.lstrip("+~").partition("=")
        if override.startswith("~"):
            sections[group] = {}
        elif override.startswith("+"):  # +loss@loss.mse=mse, after ~loss
            group, _, name = group.partition("@")
            sections[group] = {**sections[group], name.partition(".")[2]: _values(group, option, folders)}
        elif group in LISTS:
            names = [name for name in option.strip("[]").split(",") if name]
            sections[group] = {name: _values(group, name, folders) for name in names}
        else:
            sections[group] = _values(group, option, folders)
    keys = dict.fromkeys([*default_options(), *sections])  # the groups, then the other keys
    return {key: sections[key] for key in keys if key in sections and not (key in LISTS and not sections[key])}


@lru_cache(maxsize=1)
def _default() -> JsonObject:
    return by_hydra((), ())


@lru_cache(maxsize=1024)
def _values(group: str, option: str, folders: tuple[Path, ...]) -> JsonObject:
    """The values of an option, after those that it shares with others."""
    files = (folder / group / f"{option}.yaml" for folder in (conf_dir(), *folders))
    own: Any = OmegaConf.to_container(OmegaConf.load(next(file for file in files if file.is_file())))
    shared = [_values(group, name, folders) for name in own.pop("defaults", []) if name != "_self_"]
    return {key: value for each in (*shared, own) for key, value in each.items()}

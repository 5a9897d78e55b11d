"""Configs put together from the options' files: Hydra takes 0.2 s to compose one, and the tests of a worker ask for hundreds.

`install()` makes Hydra compose the default config once in a process. A config with other options is then the default config
with the contents of their files; `tests/config/test_compose.py` compares the two. Commands that start python themselves
(`own_process`) have every config composed by Hydra as a whole.
"""

from __future__ import annotations

from copy import copy, deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drivetrain.config import compose
from drivetrain.config.catalog import LISTS, default_options, options
from drivetrain.core.paths import conf_dir

by_hydra = compose._hydra_compose.__wrapped__


class Kept:
    """A config, or a part of one. OmegaConf's own copies take ten times as long."""

    def __init__(self, config: DictConfig) -> None:
        config._set_parent(None)
        self.config = config

    def __deepcopy__(self, memo: object) -> Any:
        return _copy(self.config, None)


def _copy(node: Any, parent: Any) -> Any:
    """A node of a config with all below it. What it says of its values is shared, but for its flags."""
    new, about = object.__new__(type(node)), copy(node._metadata)
    about.flags = dict(about.flags or {})
    about.resolver_cache = deepcopy(about.resolver_cache)
    new.__dict__.update(node.__dict__, _parent=parent, _metadata=about, _flags_cache=None)
    content = node.__dict__.get("_content")
    if isinstance(content, dict):
        new.__dict__["_content"] = {key: _copy(value, new) for key, value in content.items()}
    elif isinstance(content, list):
        new.__dict__["_content"] = [_copy(value, new) for value in content]
    return new


def install() -> None:
    """Let `drivetrain.config.compose` put its configs together from sections."""
    compose._hydra_compose = from_sections


def read_all() -> None:
    """Read the files of all options, once before a process forks."""
    for group, names in options().items():
        for name in names:
            _section(group, name, ())


@lru_cache(maxsize=256)
def from_sections(overrides: tuple[str, ...], folders: tuple[Path, ...]) -> Kept:
    """Return what Hydra composes from these overrides, one for each group, or one for each of several options of a group."""
    bare, default = _default()
    sections = dict(default)
    several: dict[str, list[str]] = {}
    for override in overrides:
        group, _, option = override.partition("=")
        if override.startswith("+"):  # +loss@loss.mse=mse, after ~loss
            several.setdefault(group[1:].partition("@")[0], []).append(option)
        elif not override.startswith("~"):
            sections[group] = _section(group, option, folders)
    for group, names in several.items():
        sections[group] = _of_several(group, tuple(names), folders)
    config = deepcopy(bare)
    for key in dict.fromkeys([*default_options(), *sections]):  # the groups, then the other keys
        if (kept := sections.get(key)) is not None:  # a list without options has no section
            node = config.__dict__["_content"][key] = deepcopy(kept)
            node._set_key(key)
            node._set_parent(config)
    return Kept(config)


@lru_cache(maxsize=1)
def _default() -> tuple[Kept, dict[str, Kept | None]]:
    """The config as Hydra composes it, without any value, and the values of each key."""
    config = by_hydra((), ())
    sections = {key: config._get_node(key) for key in config}
    config.__dict__["_content"].clear()
    return Kept(config), {key: Kept(node) for key, node in sections.items()}


@lru_cache(maxsize=1024)
def _section(group: str, option: str, folders: tuple[Path, ...]) -> Kept | None:
    """The values of an option, or of those of a list below their names; None without an option."""
    if group not in LISTS:
        return Kept(OmegaConf.create(_values(group, option, folders)))
    names = tuple(name.strip() for name in option.strip("[]").split(",") if name.strip())
    return _of_several(group, names, folders) if names else None


def _of_several(group: str, names: tuple[str, ...], folders: tuple[Path, ...]) -> Kept:
    return Kept(OmegaConf.create({name: _values(group, name, folders) for name in names}))


@lru_cache(maxsize=1024)
def _values(group: str, option: str, folders: tuple[Path, ...]) -> Any:
    files = (folder / group / f"{option}.yaml" for folder in (conf_dir(), *folders))
    own: Any = OmegaConf.to_container(OmegaConf.load(next(file for file in files if file.is_file())))
    shared = [_values(group, name, folders) for name in own.pop("defaults", []) if name != "_self_"]
    return {key: value for each in (*shared, own) for key, value in each.items()}

"""Command line + recipe + conf/ → one config. Every wrong word is found, not only the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.overrides import readable
from drivetrain.core.paths import conf_dir
from drivetrain.recipe import reader as recipes

LISTS = ("surgery", "augment", "logger")  # groups of which several options are chosen at once
OPEN = {"kwargs", "lr_multipliers"}  # mappings with keys of the user's: whatever the target takes, parameters' names


@dataclass
class Composed:
    """A run's config before its options are made."""

    config: DictConfig  # unresolved
    choices: dict[str, Any]  # group → option
    overrides: list[str]  # the command line
    recipe: recipes.Recipe | None = None
    notices: list[str] = field(default_factory=list)  # what the user should know when the run starts; composing is silent
    config_dirs: tuple[str, ...] = ()
    options_own: dict[str, Any] = field(default_factory=dict)  # the config before any value was set
    problems: list[str] = field(default_factory=list)  # of the words; `check` adds those of the values
    by_recipe: set[str] = field(default_factory=set)  # keys whose values are the recipe's

    @property
    def plain(self) -> dict[str, Any]:
        """The resolved config as dicts and lists."""
        return OmegaConf.to_container(self.config, resolve=True)  # type: ignore[return-value]

    def where(self, key: str) -> str:
        """ "file:line: " of a value that the recipe set, for messages."""
        return f"{self.recipe.where(key)}: " if self.recipe is not None and key in self.by_recipe else ""


def options(config_dirs: Sequence[str] = ()) -> dict[str, list[str]]:
    """The options of every group, in the order of conf/config.yaml's defaults."""
    found: dict[str, list[str]] = {}
    order = [next(iter(d)) for d in _defaults() if isinstance(d, dict)]
    for folder in (conf_dir(), *map(Path, config_dirs)):
        for path in sorted(folder.glob("*/*.yaml")):
            if path.stem not in found.setdefault(path.parent.name, []):
                found[path.parent.name].append(path.stem)
    return {g: found[g] for g in [*order, *(g for g in found if g not in order)] if g in found}


def _wrong_options(config_dirs: Sequence[str]) -> Iterator[str]:
    """What keeps the files of the user's own config dirs from being options."""
    shipped = options()
    for file in (file for folder in config_dirs for file in sorted(Path(folder).glob("*/*.yaml"))):
        group = file.parent.name
        try:
            content = yaml.safe_load(file.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            yield f"{file}: not valid YAML: {str(error).splitlines()[0]}"
            continue
        if group not in shipped:
            yield f"{file}: there is no group '{group}': {did_you_mean(group, shipped)}"
        elif file.stem in shipped[group]:
            yield f"{file}: {group}={file.stem} ships with drivetrain: give yours another name"
        elif not isinstance(content, dict) or not isinstance(content.get("_target_"), str):
            yield f"{file}: an option is a mapping of its knobs, with _target_: the dotted name of its class"


@cache
def _defaults() -> list[Any]:
    config: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))
    return config["defaults"]


def compose(overrides: Sequence[str], config_dirs: Sequence[str] = (), base: recipes.Recipe | None = None) -> Composed:
    """Compose a config from command-line overrides. `base` is a recipe already read (a resumed run's own).

    Unknown options and keys become the result's `problems`, so that they are told together with wrong values.
    Raises UserError for a recipe that cannot be read.
    """
    if wrong := list(_wrong_options(config_dirs)):
        raise UserError(wrong)
    known = options(config_dirs)
    problems: list[str] = []
    parsed = _parse(overrides, problems)
    name = parsed.pop("recipe", None)
    own = {g: v for g, v in parsed.items() if g in known}
    recipe = base
    choices: dict[str, Any] = {}
    if name is not None and base is None:
        try:
            recipe = recipes.read(recipes.find(str(name)))
        except UserError as error:  # the values mean nothing without it; the options do
            for group, option in own.items():
                _choose(choices, known, group, option, problems, "")
            raise UserError([*error.problems, *problems]) from None
    values: dict[str, Any] = {}
    notices: list[str] = []
    if recipe is not None:
        for group, option in recipe.choices.items():
            _choose(choices, known, group, option, problems, recipe.where(group) + ": ")
        for key, value in recipe.values.items():
            if key in known:
                problems.append(
                    f"{recipe.where(key)}: {key} is a group: choose its option under defaults, as '- override /{key}: {value}'"
                )
            else:
                values[key] = value
    for group, option in own.items():
        if recipe is not None and recipe.choices.get(group, option) != option:
            kept = [k for k in values if k.split(".")[0] == group and k not in parsed]
            _carry(recipe, group, option, kept, values, config_dirs, notices)
        _choose(choices, known, group, option, problems, "")
    values |= {k: v for k, v in parsed.items() if k not in known}

    config = _hydra(choices, config_dirs)
    options_own: Any = OmegaConf.to_container(config)
    final = {g: choices.get(g, default) for g, default in _default_choices().items()}
    composed = Composed(config, final, list(overrides), recipe, notices, tuple(config_dirs), options_own, problems)
    composed.by_recipe = set(values) - set(parsed)
    unknown = {g for g in {**own, **(recipe.choices if recipe is not None else {})} if g in known and g not in choices}
    for key, value in values.items():
        if key.split(".")[0] in unknown:
            problems += _no_ones_knob(key, value, known, config_dirs, composed.where(key))
        else:
            _set(config, key, value, known, choices, problems, composed.where(key))
    try:
        composed.plain  # noqa: B018 - resolves every interpolation
    except OmegaConfBaseException as error:
        raise UserError([*problems, f"a reference in the config cannot be resolved: {str(error).splitlines()[0]}"]) from None
    return composed


def _parse(overrides: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """Key → value of each override."""
    parsed = {}
    for text, override in readable(overrides, "key=value or group=option", problems):
        key = override.key_or_group
        if override.is_delete():
            problems.append(f"'{text}': nothing can be deleted: choose a group's off switch ({key}=none) or set another value")
        elif "interval(" in text and override.is_sweep_override():
            problems.append(f"'{text}' is to be searched: say -m hydra/sweeper=optuna before it, or give one value")
        elif override.is_sweep_override():
            problems.append(f"'{text}' gives several values: say -m before it to run them all as a sweep, or quote it")
        elif key.startswith(("hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper")):
            problems.append(f"'{text}' is for several runs: say -m before it, or leave it out")
        elif key == "hydra" or key.startswith(("hydra.", "hydra/")):
            problems.append(
                f"'{text}': drivetrain runs Hydra's config without its launcher: set output_dir=… for the place of runs"
            )
        elif override.package is not None:
            problems.append(f"'{text}': a group stands in its own place: write {key}={override.value()}")
        else:
            parsed[key] = override.value()
    return parsed


def _choose(
    choices: dict[str, Any], known: dict[str, list[str]], group: str, option: Any, problems: list[str], where: str
) -> None:
    if group not in known:
        problems.append(f"{where}there is no group '{group}': {did_you_mean(group, known)}")
        return
    if group in LISTS:
        option = option if isinstance(option, list) else [] if option is None else [option]
    elif option is None:
        option = "none"
    elif isinstance(option, list):
        problems.append(f"{where}{group}={option}: one option, not a list: {did_you_mean('', known[group])}")
        return
    names = option if isinstance(option, list) else [option]
    wrong = [name for name in names if str(name) not in known[group]]
    for name in wrong:
        problems.append(f"{where}{group}={name} is no option of {group}: {did_you_mean(str(name), known[group])}")
    if len(set(map(str, names))) < len(names):
        problems.append(f"{where}{group}={option} names an option twice")
    elif not wrong:
        choices[group] = [str(n) for n in option] if isinstance(option, list) else str(option)


def _carry(
    recipe: recipes.Recipe,
    group: str,
    option: Any,
    kept: list[str],
    values: dict[str, Any],
    config_dirs: Sequence[str],
    notices: list[str],
) -> None:
    """The command line chose another option than the recipe: the recipe's values go along where the option has them."""
    has = option_keys(group, option, config_dirs)
    lost = [k for k in kept if k.split(".", 1)[1].split(".")[0] not in has]
    for key in lost:
        del values[key]
    stay = [f"{k}={values[k]}" for k in kept if k not in lost]
    if kept:
        notices.append(
            f"recipe {recipe.name} was written for {group}={recipe.choices[group]}; with {group}={option} from the command line"
            + (f" its {', '.join(stay)} still holds" if stay else "")
            + (" and" if stay and lost else "")
            + (f" its {', '.join(lost)} has no place and is left out" if lost else "")
        )


def option_keys(group: str, option: Any, config_dirs: Sequence[str]) -> set[str]:
    for folder in (conf_dir(), *map(Path, config_dirs)):
        file = folder / group / f"{option}.yaml"
        if file.is_file():
            return set(map(str, OmegaConf.load(file)))
    return set()


def _default_choices() -> dict[str, Any]:
    return {g: o for d in _defaults() if isinstance(d, dict) for g, o in d.items()}


def _hydra(choices: dict[str, Any], config_dirs: Sequence[str]) -> DictConfig:
    """conf/config.yaml with these options, composed by Hydra."""
    words = [f"{g}=[{','.join(o)}]" if isinstance(o, list) else f"{g}={o}" for g, o in choices.items()]
    if not config_dirs:
        return deepcopy(_of_conf(tuple(words)))  # the jobs of a sweep differ in values more often than in options
    return _hydra_of([*words, "hydra.searchpath=[" + ",".join(f"file://{Path(d).resolve()}" for d in config_dirs) + "]"])


@lru_cache(maxsize=16)
def _of_conf(words: tuple[str, ...]) -> DictConfig:
    return _hydra_of(words)


def _hydra_of(words: Sequence[str]) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return hydra_compose("config", overrides=list(words))
    except HydraException as error:
        raise UserError(f"the config cannot be composed: {str(error).splitlines()[0]}") from None
    finally:
        GlobalHydra.instance().clear()


def _no_ones_knob(key: str, value: Any, known: dict[str, list[str]], config_dirs: Sequence[str], where: str) -> Iterator[str]:
    """The problem of a knob that no option of its group has: which option was meant is not known."""
    group, knob = key.split(".")[:2]
    of_options = [option_keys(group, option, config_dirs) for option in known[group]]
    names = known[group] if group in LISTS else set().union(*of_options) - {"_target_"}
    if knob not in names:
        yield f"{where}no option of {group} has '{knob}' ({key}={value}): {did_you_mean(knob, names)}"


def _set(
    config: DictConfig,
    key: str,
    value: Any,
    known: dict[str, list[str]],
    choices: dict[str, Any],
    problems: list[str],
    where: str,
) -> None:
    """Set a key that exists; keys below an empty mapping are free."""
    parts, node = key.split("."), config
    for depth, part in enumerate(parts):
        if not isinstance(node, DictConfig):
            problems.append(f"{where}{key}: {'.'.join(parts[:depth])} is a value and has no '{part}'")
            return
        if part not in node:
            if OPEN.intersection(parts[:depth]):
                break
            inside = ".".join(parts[:depth])
            place = (
                f"{inside}={choices.get(inside, _default_choices().get(inside))}" if inside in known else inside or "the config"
            )
            names = [str(k) for k in node if k != "_target_"]
            suggestion = did_you_mean(part, {*names, *(known if not depth else [])})
            if depth < 2 < len(parts) and parts[0] in LISTS:  # the knob of an option that is not among those chosen
                group, option = parts[:2]
                choose = f"say {group}=[{option}] too" if option in known[group] else did_you_mean(option, known[group])
                problems.append(f"{where}{key}={value}: {group} has no {option} here: {choose}")
                return
            others = [o for o in known.get(inside, []) if part in option_keys(inside, o, ())]
            if others:
                suggestion = " or ".join(f"{inside}={o}" for o in others) + " has it"
            problems.append(f"{where}{place} has no '{part}' ({key}={value}): {suggestion}")
            return
        if depth < len(parts) - 1:
            node = node[part]
    if parts[-1] == "_target_" or "_target_" in parts:
        problems.append(
            f"{where}{key}: a target is not set by hand: your own class goes in by model=own model.target=… or --config-dir"
        )
        return
    current = OmegaConf.select(config, key)
    if isinstance(current, DictConfig) and current and not isinstance(value, dict):
        problems.append(f"{where}{key}={value}: {key} is a mapping of {', '.join(map(str, current))}: set one of those")
        return
    OmegaConf.update(config, key, value, force_add=True)

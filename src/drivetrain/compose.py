"""Command line + recipe + conf/ → one config. Every wrong word is found, not only the first."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drivetrain import recipe as recipes
from drivetrain.errors import UserError, did_you_mean
from drivetrain.paths import conf_dir

LISTS = ("surgery", "augment", "logger")  # groups of which several options are chosen at once
OPEN = {"kwargs", "lr_of"}  # mappings with keys of the user's: whatever the target takes, parameters' names
MAY_LENGTHEN = ("epochs", "updates")  # what a resumed run may change


@dataclass
class Composed:
    """A run's config before its options are made."""

    config: DictConfig  # unresolved
    choices: dict[str, Any]  # group → option
    overrides: list[str]  # the command line
    recipe: recipes.Recipe | None = None
    said: list[str] = field(default_factory=list)  # what the user should know
    config_dirs: tuple[str, ...] = ()
    options_own: dict[str, Any] = field(default_factory=dict)  # the config before any value was set
    problems: list[str] = field(default_factory=list)  # of the words; `check` adds those of the values

    @property
    def plain(self) -> dict[str, Any]:
        """The resolved config as dicts and lists."""
        return OmegaConf.to_container(self.config, resolve=True)  # type: ignore[return-value]


def options(config_dirs: Sequence[str] = ()) -> dict[str, list[str]]:
    """The options of every group, in the order of conf/config.yaml's defaults."""
    found: dict[str, list[str]] = {}
    order = [next(iter(d)) for d in _defaults() if isinstance(d, dict)]
    for folder in (conf_dir(), *map(Path, config_dirs)):
        for path in sorted(folder.glob("*/*.yaml")):
            found.setdefault(path.parent.name, []).append(path.stem)
    return {g: found[g] for g in [*order, *(g for g in found if g not in order)] if g in found}


@cache
def _defaults() -> list[Any]:
    config: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))
    return config["defaults"]


def compose(overrides: Sequence[str], config_dirs: Sequence[str] = (), base: recipes.Recipe | None = None) -> Composed:
    """Compose a config from command-line overrides. `base` is a recipe already read (a resumed run's own).

    Unknown options and keys become the result's `problems`, so that they are told together with wrong values.
    Raises UserError for a recipe that cannot be read.
    """
    known = options(config_dirs)
    problems: list[str] = []
    parsed = _parse(overrides, problems)
    recipe = base
    if "recipe" in parsed:
        name = parsed.pop("recipe")
        if name is not None and base is None:
            recipe = recipes.read(recipes.find(str(name)))
    choices: dict[str, Any] = {}
    values: dict[str, Any] = {}
    said: list[str] = []
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
    own = {g: v for g, v in parsed.items() if g in known}
    for group, option in own.items():
        if recipe is not None and recipe.choices.get(group, option) != option:
            kept = [k for k in values if k.split(".")[0] == group]
            _carry(recipe, group, option, kept, values, config_dirs, said)
        _choose(choices, known, group, option, problems, "")
    values |= {k: v for k, v in parsed.items() if k not in known}

    config = _hydra(choices, config_dirs)
    options_own: Any = OmegaConf.to_container(config)
    for key, value in values.items():
        where = recipe.where(key) + ": " if recipe is not None and key not in parsed and key in recipe.lines else ""
        _set(config, key, value, known, choices, problems, where)
    final = {g: choices.get(g, default) for g, default in _default_choices().items()}
    composed = Composed(config, final, list(overrides), recipe, said, tuple(config_dirs), options_own, problems)
    try:
        composed.plain  # noqa: B018 - resolves every interpolation
    except OmegaConfBaseException as error:
        raise UserError([*problems, f"a reference in the config cannot be resolved: {str(error).splitlines()[0]}"]) from None
    return composed


def _parse(overrides: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """Key → value of each override, by Hydra's own grammar."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, parsed = OverridesParser.create(), {}
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            problems.append(f"{text!r} is not of the form key=value or group=option")
            continue
        key = override.key_or_group
        if override.is_delete():
            problems.append(f"'{text}': nothing can be deleted: choose a group's off switch ({key}=none) or set another value")
        elif override.is_sweep_override():
            problems.append(f"'{text}' gives several values: say -m before it to run them all as a sweep, or quote it")
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
    said: list[str],
) -> None:
    """The command line chose another option than the recipe: the recipe's values go along where the option has them."""
    has = _option_keys(group, option, config_dirs)
    lost = [k for k in kept if k.split(".", 1)[1].split(".")[0] not in has]
    for key in lost:
        del values[key]
    stay = [f"{k}={values[k]}" for k in kept if k not in lost]
    if kept:
        said.append(
            f"recipe {recipe.name} was written for {group}={recipe.choices[group]}; with {group}={option} from the command line"
            + (f" its {', '.join(stay)} still holds" if stay else "")
            + (" and" if stay and lost else "")
            + (f" its {', '.join(lost)} has no place and is left out" if lost else "")
        )


def _option_keys(group: str, option: Any, config_dirs: Sequence[str]) -> set[str]:
    for folder in (conf_dir(), *map(Path, config_dirs)):
        file = folder / group / f"{option}.yaml"
        if file.is_file():
            return set(map(str, OmegaConf.load(file)))
    return set()


def _default_choices() -> dict[str, Any]:
    return {g: o for d in _defaults() if isinstance(d, dict) for g, o in d.items()}


def _hydra(choices: dict[str, Any], config_dirs: Sequence[str]) -> DictConfig:
    """conf/config.yaml with these options, composed by Hydra."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    words = [f"{g}=[{','.join(o)}]" if isinstance(o, list) else f"{g}={o}" for g, o in choices.items()]
    if config_dirs:
        words.append("hydra.searchpath=[" + ",".join(f"file://{Path(d).resolve()}" for d in config_dirs) + "]")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return hydra_compose("config", overrides=words)
    except HydraException as error:
        raise UserError(f"the config cannot be composed: {str(error).splitlines()[0]}") from None
    finally:
        GlobalHydra.instance().clear()


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
            others = [o for o in known.get(inside, []) if part in _option_keys(inside, o, ())]
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


def operator_values(composed: Composed, operators: set[str]) -> dict[str, Any]:
    """The operator's part of the config: paths, loggers, device, as dotted keys."""
    return {k: v for k, v in flatten(composed.plain).items() if _is_operators(k, operators)}


def _is_operators(key: str, operators: set[str]) -> bool:
    return key in operators or any(key.startswith(f"{o}.") for o in operators)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; an empty mapping is a value."""
    if not isinstance(tree, dict) or not tree:
        return {prefix[:-1]: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.")
    return flat


def config_hash(composed: Composed, operators: set[str]) -> str:
    """What makes two runs the same run: the config without the operator's part."""
    flat = {k: v for k, v in flatten(composed.plain).items() if not _is_operators(k, operators)}
    return hashlib.sha256(json.dumps(flat, sort_keys=True, default=str).encode()).hexdigest()[:16]


def differences(old: dict[str, Any], new: dict[str, Any], operators: set[str]) -> list[str]:
    """Keys in which two configs differ, as 'key: old → new', without the operator's part and the run's length."""
    a, b = flatten(old), flatten(new)
    skip = operators | set(MAY_LENGTHEN)
    keys = [k for k in {**a, **b} if a.get(k) != b.get(k) and not _is_operators(k, skip)]
    return [f"{k}: {a.get(k, 'absent')} → {b.get(k, 'absent')}" for k in sorted(keys)]


def to_recipe(composed: Composed, operators: set[str]) -> str:
    """The recipe that replays a config: every group's option, and the values that differ from the option's own."""
    chosen = {g: o for g, o in composed.choices.items() if g not in operators}
    plain = flatten(composed.options_own)
    given = flatten(OmegaConf.to_container(composed.config))
    differing = {k: v for k, v in given.items() if plain.get(k) != v and not _is_operators(k, operators)}
    tree = OmegaConf.create({})
    for key, value in differing.items():
        OmegaConf.update(tree, key, value, force_add=True)
    lines = [f"description: {json.dumps(composed.recipe.description)}"] if composed.recipe and composed.recipe.description else []
    lines += ["defaults:"] + [f"  - override /{g}: {json.dumps(o) if isinstance(o, list) else o}" for g, o in chosen.items()]
    return "\n".join(lines) + "\n" + (OmegaConf.to_yaml(tree) if differing else "")


def operator_words(operator: dict[str, Any], composed: Composed) -> dict[str, Any]:
    """The operator's settings as override keys and values: options of its groups, values elsewhere."""
    words = {k: v for k, v in operator.items() if k.split(".")[0] not in ("logger", "resume", "resume_changed", "recipe")}
    return {**words, "logger": composed.choices["logger"]}


def as_word(value: Any) -> str:
    """A plain value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(as_word, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{as_word(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", value):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)

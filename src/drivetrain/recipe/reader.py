"""Reading a shared recipe safely, before Hydra sees anything of it: plain YAML, choices and values, never code."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.paths import recipes_dir
from drivetrain.recipe import claim as claims
from drivetrain.recipe import safe_yaml
from drivetrain.recipe.safe_yaml import is_key, may_set, plain

MAX_JOBS = 1000
_OVERRIDE = re.compile(r"(?:optional\s+)?(?:override\s+)?/?([a-z_]+)$")
_OPTION = re.compile(r"[A-Za-z0-9_]+$")


@dataclass
class Recipe:
    """A recipe's content: option per group, value per dotted key, and the grid of a sweep."""

    name: str
    path: Path
    description: str = ""
    choices: dict[str, str | list[str]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    sweep: dict[str, list[Any]] = field(default_factory=dict)
    claim: claims.Claim | None = None  # what it is said to be worth: no part of the config
    lines: dict[str, int] = field(default_factory=dict)  # key → its line, for messages

    def where(self, key: str) -> str:
        """file:line of a key."""
        return f"{self.path}:{self.lines.get(key, 1)}"

    def cells(self, groups: Container[str], given: Container[str] = ()) -> Iterator[tuple[dict[str, Any], Recipe]]:
        """What differs, and the recipe of it, for each combination of the sweep's values; `given` keys are not swept."""
        axes = {key: values for key, values in self.sweep.items() if key not in given}
        if (jobs := math.prod(map(len, axes.values()))) > MAX_JOBS:
            raise UserError(f"{self.path}: its sweep makes {jobs:,} jobs: at most {MAX_JOBS:,}")
        for values in itertools.product(*axes.values()):
            cell = dict(zip(axes, values, strict=True))
            yield cell, self.cell(cell, groups)

    def cell(self, cell: dict[str, Any], groups: Container[str]) -> Recipe:
        """The recipe of one combination of the sweep's values."""
        chosen, others = _parted(cell, groups)
        return replace(self, choices={**self.choices, **chosen}, values={**self.values, **others}, sweep={})

    def baseline(self, groups: Container[str]) -> Recipe:
        """The recipe that the claim is against, a stranger's like this one.

        A group that the claim names is that option as it ships, with the claim's knobs and none of the recipe's.
        """
        assert self.claim is not None
        chosen, others = _parted(self.claim.against, groups)
        kept = {key: value for key, value in self.values.items() if key.split(".")[0] not in chosen}
        lines = {**self.lines, **self.claim.lines}
        return replace(self, choices={**self.choices, **chosen}, values={**kept, **others}, claim=None, lines=lines)


def _parted(given: dict[str, Any], groups: Container[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What chooses an option, and what sets a value."""
    return {k: v for k, v in given.items() if k in groups}, {k: v for k, v in given.items() if k not in groups}


def find(name: str) -> Path:
    """The file of `recipe=NAME` (shipped recipes, then ./recipes) or `recipe=PATH`. Raises UserError."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = Path(name)
        if path.is_dir():
            raise UserError(f"recipe={name} is a directory: name the recipe.yaml in it")
        if not path.is_file():
            raise UserError(f"recipe={name}: there is no such file")
        return path
    for folder in (recipes_dir(), Path("recipes")):
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    raise UserError(f"recipe={name} is not known: {did_you_mean(name, shipped())}, or give a path that ends in .yaml")


def shipped() -> list[str]:
    """The names `recipe=NAME` finds."""
    return sorted({p.stem for folder in (recipes_dir(), Path("recipes")) for p in folder.glob("*.yaml")})


def read(path: Path) -> Recipe:
    """A recipe file, read and checked. Raises UserError with every problem and its line."""
    root = safe_yaml.load(path)
    name = f"of run {path.parent.name}" if path.name == "recipe.yaml" else path.stem
    recipe = Recipe(name, path)
    problems: list[str] = []
    for key_node in safe_yaml.repeated(root):
        problems.append(f"{path}:{key_node.start_mark.line + 1}: '{key_node.value}' is given twice")
    for key_node, node in root.value if root is not None else []:
        _section(recipe, str(key_node.value), key_node, node, problems)
    if recipe.claim is not None and recipe.sweep:
        problems.append(f"{path}: a sweep claims nothing: claim: is for a recipe of one config")
    if problems:
        raise UserError(dict.fromkeys(problems))
    return recipe


def _section(recipe: Recipe, key: str, key_node: Any, node: Any, problems: list[str]) -> None:
    where = f"{recipe.path}:{key_node.start_mark.line + 1}"
    if key == "description":
        recipe.description = str(plain(node, where, key, problems))
    elif key == "defaults":
        _defaults(recipe, node, where, problems)
    elif key == "claim":
        recipe.claim = claims.read(recipe.path, key_node, node, problems)
    elif key == "sweep":
        for k, v in node.value if isinstance(node, yaml.MappingNode) else []:
            _axis(recipe, str(k.value), k, v, problems)
        if not isinstance(node, yaml.MappingNode) or not node.value:
            problems.append(f"{where}: sweep: wants a mapping of key → list of values")
    elif may_set(key, where, problems):
        _values(recipe, key, key_node, node, problems)


def _axis(recipe: Recipe, key: str, key_node: Any, node: Any, problems: list[str]) -> None:
    """One key of the sweep's grid: as untrusted as the rest of the file."""
    where = f"{recipe.path}:{key_node.start_mark.line + 1}"
    if not may_set(key, where, problems) or not is_key(key, where, problems):
        return
    choices = plain(node, where, key, problems)
    recipe.sweep[key], recipe.lines[key] = choices if isinstance(choices, list) else [choices], key_node.start_mark.line + 1
    if not recipe.sweep[key]:
        problems.append(f"{where}: '{key}' has no values to sweep over")


def _defaults(recipe: Recipe, node: Any, where: str, problems: list[str]) -> None:
    if not isinstance(node, yaml.SequenceNode):
        problems.append(f"{where}: defaults: wants a list such as '- override /optimizer: sgd'")
        return
    for entry in node.value:
        at = f"{recipe.path}:{entry.start_mark.line + 1}"
        if isinstance(entry, yaml.ScalarNode) and entry.value == "_self_":
            continue
        pairs = entry.value if isinstance(entry, yaml.MappingNode) else []
        match = _OVERRIDE.match(str(pairs[0][0].value)) if len(pairs) == 1 else None
        if match is None:
            shown = entry.value if isinstance(entry, yaml.ScalarNode) else str(pairs[0][0].value) if pairs else ""
            if str(shown).lstrip("/").startswith(("override /hydra", "hydra")):
                problems.append(f"{at}: '{shown}' is not a recipe's to set (Hydra's settings): give it on the command line")
            else:
                problems.append(f"{at}: {shown!r} in defaults: a recipe chooses options as '- override /group: option'")
            continue
        group, option = match[1], plain(pairs[0][1], at, match[1], problems)
        if not may_set(group, at, problems):
            continue
        if group in recipe.choices:
            problems.append(f"{at}: {group} is chosen twice: here and in line {recipe.lines[group]}")
        elif all(isinstance(o, str) and _OPTION.match(o) for o in (option if isinstance(option, list) else [option])):
            recipe.choices[group], recipe.lines[group] = option, entry.start_mark.line + 1
        else:
            problems.append(f"{at}: {group}: {option!r} is no option name: options are plain names, never paths")


def _values(recipe: Recipe, key: str, key_node: Any, node: Any, problems: list[str]) -> None:
    where = f"{recipe.path}:{key_node.start_mark.line + 1}"
    if not is_key(key, where, problems):
        return
    if isinstance(node, yaml.MappingNode) and node.value:
        for k, v in node.value:
            _values(recipe, f"{key}.{k.value}", k, v, problems)
    elif key in recipe.values:  # once as `a: {b: …}` and once as `a.b: …`
        problems.append(f"{where}: '{key}' is given twice: here and in line {recipe.lines[key]}")
    else:
        recipe.values[key], recipe.lines[key] = plain(node, where, key, problems), key_node.start_mark.line + 1

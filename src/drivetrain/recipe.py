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

from drivetrain.errors import UserError, did_you_mean
from drivetrain.paths import recipes_dir

MAX_BYTES, MAX_NODES, MAX_DEPTH, MAX_JOBS = 64 * 1024, 2000, 8, 1000
OPERATORS = {  # what belongs to whoever runs it, never to a file that was shared
    "hydra": "Hydra's settings", "trust": "trust in code", "resume": "the run's place", "resume_changed": "the run's place",
    "recipe": "another recipe", "output_dir": "a path", "logger": "loggers",
}  # fmt: skip
_OVERRIDE = re.compile(r"(?:optional\s+)?(?:override\s+)?/?([a-z_]+)$")
_OPTION = re.compile(r"[A-Za-z0-9_]+$")
_INTERPOLATION = re.compile(r"\$\{([^}]*)\}?")


@dataclass
class Recipe:
    """A recipe's content: option per group, value per dotted key, and the grid of a sweep."""

    name: str
    path: Path
    description: str = ""
    choices: dict[str, str | list[str]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    sweep: dict[str, list[Any]] = field(default_factory=dict)
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
        chosen = {key: value for key, value in cell.items() if key in groups}
        others = {key: value for key, value in cell.items() if key not in groups}
        return replace(self, choices={**self.choices, **chosen}, values={**self.values, **others}, sweep={})


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
    try:
        raw = path.read_bytes()[: MAX_BYTES + 1]
    except OSError as error:
        raise UserError(f"recipe {path} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise UserError(f"recipe {path} is larger than {MAX_BYTES // 1024} KiB: that is no recipe")
    root = _nodes(path, raw)
    name = f"of run {path.parent.name}" if path.name == "recipe.yaml" else path.stem
    recipe = Recipe(name, path)
    problems: list[str] = []
    for key_node in _repeated(root):
        problems.append(f"{path}:{key_node.start_mark.line + 1}: '{key_node.value}' is given twice")
    for key_node, node in root.value if root is not None else []:
        _section(recipe, str(key_node.value), key_node, node, problems)
    if problems:
        raise UserError(dict.fromkeys(problems))
    return recipe


def _nodes(path: Path, raw: bytes) -> yaml.MappingNode | None:
    """The YAML tree, after looking at its events only: no alias, no tag, no more than the caps."""
    try:
        text, depth, nodes = raw.decode("utf-8"), 0, 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            where = f"{path}:{event.start_mark.line + 1}"
            nodes += isinstance(event, yaml.NodeEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise UserError(f"{where}: a recipe has no YAML anchors or aliases: write the value out")
            if getattr(event, "tag", None):
                raise UserError(
                    f"{where}: a recipe has no YAML tags ({getattr(event, 'tag', '')}): it holds plain values, never objects"
                )
            if nodes > MAX_NODES or depth > MAX_DEPTH:
                raise UserError(f"{where}: a recipe has at most {MAX_NODES} values, {MAX_DEPTH} deep: this is more")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError:
        raise UserError(f"recipe {path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if node is not None and not isinstance(node, yaml.MappingNode):
        kind = "list" if isinstance(node, yaml.SequenceNode) else "single value"
        raise UserError(f"recipe {path} is a {kind}, not a mapping: write 'defaults:' and 'group: {{key: value}}' entries")
    return node


def _repeated(node: Any) -> Iterator[Any]:
    """The keys that stand in a mapping a second time, at any depth."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value in node.value:
            if str(key_node.value) in seen:
                yield key_node
            seen.add(str(key_node.value))
            yield from _repeated(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _repeated(value)


def _section(recipe: Recipe, key: str, key_node: Any, node: Any, problems: list[str]) -> None:
    where = f"{recipe.path}:{key_node.start_mark.line + 1}"
    if key == "description":
        recipe.description = str(_plain(node, where, key, problems))
    elif key == "defaults":
        _defaults(recipe, node, where, problems)
    elif key == "sweep":
        for k, v in node.value if isinstance(node, yaml.MappingNode) else []:
            _axis(recipe, str(k.value), k, v, problems)
        if not isinstance(node, yaml.MappingNode) or not node.value:
            problems.append(f"{where}: sweep: wants a mapping of key → list of values")
    elif _may_set(key, where, problems):
        _values(recipe, key, key_node, node, problems)


def _axis(recipe: Recipe, key: str, key_node: Any, node: Any, problems: list[str]) -> None:
    """One key of the sweep's grid: as untrusted as the rest of the file."""
    where = f"{recipe.path}:{key_node.start_mark.line + 1}"
    if not _may_set(key, where, problems) or not _is_key(key, where, problems):
        return
    choices = _plain(node, where, key, problems)
    recipe.sweep[key], recipe.lines[key] = choices if isinstance(choices, list) else [choices], key_node.start_mark.line + 1
    if not recipe.sweep[key]:
        problems.append(f"{where}: '{key}' has no values to sweep over")


def _may_set(key: str, where: str, problems: list[str]) -> bool:
    owner = re.split(r"[./]", key)[0]
    if owner in OPERATORS:
        problems.append(f"{where}: '{key}' is not a recipe's to set ({OPERATORS[owner]}): give it on the command line")
    return owner not in OPERATORS


def _is_key(key: str, where: str, problems: list[str]) -> bool:
    if any(part.startswith("_") for part in key.split(".")):
        problems.append(f"{where}: '{key}': a recipe names options and values, never a target or another key of Hydra's")
    elif not re.fullmatch(r"[A-Za-z0-9_.*?]+", key):  # * and ? in patterns of parameters' names
        problems.append(f"{where}: '{key}' is no key: keys are plain names")
    else:
        return True
    return False


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
        group, option = match[1], _plain(pairs[0][1], at, match[1], problems)
        if not _may_set(group, at, problems):
            continue
        if group in recipe.choices:
            problems.append(f"{at}: {group} is chosen twice: here and in line {recipe.lines[group]}")
        elif all(isinstance(o, str) and _OPTION.match(o) for o in (option if isinstance(option, list) else [option])):
            recipe.choices[group], recipe.lines[group] = option, entry.start_mark.line + 1
        else:
            problems.append(f"{at}: {group}: {option!r} is no option name: options are plain names, never paths")


def _values(recipe: Recipe, key: str, key_node: Any, node: Any, problems: list[str]) -> None:
    where = f"{recipe.path}:{key_node.start_mark.line + 1}"
    if not _is_key(key, where, problems):
        return
    if isinstance(node, yaml.MappingNode) and node.value:
        for k, v in node.value:
            _values(recipe, f"{key}.{k.value}", k, v, problems)
    elif key in recipe.values:  # once as `a: {b: …}` and once as `a.b: …`
        problems.append(f"{where}: '{key}' is given twice: here and in line {recipe.lines[key]}")
    else:
        recipe.values[key], recipe.lines[key] = _plain(node, where, key, problems), key_node.start_mark.line + 1


def _plain(node: Any, where: str, key: str, problems: list[str]) -> Any:
    """A node of `key` as plain Python values; only `${key.of.the.config}` as interpolation."""
    if isinstance(node, yaml.MappingNode):
        result = {}
        for k, v in node.value:
            if str(k.value).startswith("_"):
                problems.append(f"{where}: '{k.value}': a recipe names options and values, never a target")
            result[str(k.value)] = _plain(v, where, key, problems)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_plain(v, where, key, problems) for v in node.value]
    for name in _INTERPOLATION.findall(node.value):
        if not re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*", name):
            problems.append(f"{where}: '${{{name}}}': a recipe refers to keys of the config alone, never to the environment")
    if node.style is None and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", node.value):
        return float(node.value)  # YAML 1.1 reads 1e-3 as text
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_object(node)
    except (ValueError, yaml.YAMLError):  # 2026-13-01 looks like a date, = like a default, and neither is one
        value = node
    finally:
        loader.dispose()
    if not isinstance(value, str | int | float | bool | None):
        shown = node.value if len(node.value) < 40 else f"{node.value[:40]}…"
        problems.append(f"{where}: {key}: {shown} reads as a date, binary data or nothing at all: quote it, if it is a text")
        return None
    return value

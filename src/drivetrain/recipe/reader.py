"""Reading a shared recipe: options and values in plain YAML, never code. Hydra sees only what was checked here."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from drivetrain.core import files
from drivetrain.core.errors import UserError
from drivetrain.core.overrides import redact
from drivetrain.core.typed import JsonMapping, JsonObject
from drivetrain.recipe import claim as claims
from drivetrain.recipe import safe_yaml
from drivetrain.recipe.safe_yaml import allowed_in_recipe, code_refusal, is_plain_key, names_code, plain_value, printable
from drivetrain.recipe.write import FORMS, Header, read_header

MAX_JOBS = 1000
_OVERRIDE = re.compile(r"(?:optional\s+)?(?:override\s+)?/?([a-z_]+)$")
_OPTION = re.compile(r"[A-Za-z0-9_]+$")


@dataclass(frozen=True)
class Source:
    """The source of a recipe, as a run records it: what `recipe=` was given, and the SHA-256 of the recipe's text."""

    given: str  # a name, a path or a pinned address
    sha256: str

    def record(self) -> dict[str, str]:
        """The entry of environment.json. The query of an address is left out: it may hold a key."""
        return {"given": redact(f"recipe={self.given}").removeprefix("recipe="), "sha256": self.sha256}


@dataclass
class Recipe:
    """The content of a recipe file: an option for each group, a value for each dotted key, and the grid of a sweep."""

    name: str
    path: Path
    description: str = ""
    choices: dict[str, str | list[str]] = field(default_factory=dict)
    values: JsonObject = field(default_factory=dict)
    sweep: dict[str, list[object]] = field(default_factory=dict)
    claim: claims.Claim | None = None  # what was measured of it; not part of the config
    lines: dict[str, int] = field(default_factory=dict)  # key → its line, for messages
    header: Header = field(default_factory=Header)  # of a recipe that drivetrain wrote
    unchanged: frozenset[str] = frozenset()  # groups and keys of `unchanged:`, which were mere defaults when it was written
    source: Source | None = None  # where it came from; None for a run's own

    @property
    def word(self) -> str:
        """The word by which `recipe=` finds it again."""
        return self.source.given if self.source is not None else str(self.path)

    def where(self, key: str) -> str:
        """The file:line of a key."""
        return f"{self.path}:{self.lines.get(key, 1)}"

    def cells(self, groups: Container[str], given: Container[str] = ()) -> Iterator[tuple[JsonObject, Recipe]]:
        """Each combination of the sweep's values, and the recipe with those values set; keys in `given` are not swept."""
        axes = {key: values for key, values in self.sweep.items() if key not in given}
        if (jobs := math.prod(map(len, axes.values()))) > MAX_JOBS:
            raise UserError(f"{self.path}: its sweep has {jobs:,} jobs, and at most {MAX_JOBS:,} are allowed")
        for values in itertools.product(*axes.values()):
            cell = dict(zip(axes, values, strict=True))
            yield cell, self.cell(cell, groups)

    def cell(self, cell: JsonMapping, groups: Container[str]) -> Recipe:
        """The recipe with one combination of the sweep's values set."""
        chosen, others = _split(cell, groups)
        kept = {k: v for k, v in self.values.items() if k not in self.unchanged or holds_for(k, self.choices, chosen)}
        header = Header() if cell else self.header  # the hash is that of the file
        return replace(self, choices={**self.choices, **chosen}, values={**kept, **others}, sweep={}, header=header)

    def only_chosen(self) -> Recipe:
        """The recipe without what was merely a default when it was written."""
        choices = {group: option for group, option in self.choices.items() if group not in self.unchanged}
        values = {key: value for key, value in self.values.items() if key not in self.unchanged}
        return replace(self, choices=choices, values=values, header=Header(), unchanged=frozenset())

    def baseline(self, groups: Container[str]) -> Recipe:
        """The recipe that the claim of speed compares with, itself where it has none; from the same file, so checked like any.

        A group that the claim names has that option's own defaults and the claim's settings, and none of the recipe's settings.
        """
        if self.claim is None or self.claim.speed is None:
            return replace(self, claim=None)
        against = self.claim.speed.against
        chosen, others = _split(against, groups)
        kept = {key: value for key, value in self.values.items() if key.split(".")[0] not in chosen}
        changed = replace(self, choices={**self.choices, **chosen}, values={**kept, **others})
        return replace(changed, claim=None, lines={**self.lines, **against.lines}, header=Header())


def _split(given: JsonMapping, groups: Container[str]) -> tuple[JsonObject, JsonObject]:
    """The entries that choose an option, and those that set a value."""
    return {k: v for k, v in given.items() if k in groups}, {k: v for k, v in given.items() if k not in groups}


def read(path: Path, raw: bytes | None = None) -> Recipe:
    """Read and check a recipe file, or its bytes. Raises UserError with every problem and its line."""
    root = safe_yaml.load(path, raw)
    name = f"of run {path.parent.name}" if path.name == "recipe.yaml" else path.stem
    recipe = Recipe(name, path)
    problems: list[str] = []
    problems += [_twice(path, key_node) for key_node in safe_yaml.duplicate_keys(root)]
    recipe.header = read_header(path, root, problems)
    below = Recipe(name, path)
    for key_node, node in root.value if root is not None else []:
        key = str(key_node.value)  # a key may be a list
        if key == "unchanged":
            _unchanged(below, key_node, node, problems)
        elif key not in FORMS:
            _section(recipe, key, key_node, node, problems)
    _take_unchanged(recipe, below)
    if recipe.claim is not None and recipe.sweep:
        problems.append(f"{path}: a recipe with sweep: cannot have claim:, which is about a single config")
    if problems:
        raise UserError(dict.fromkeys(problems))
    return recipe


def read_of_run(run_dir: Path) -> Recipe:
    """Read and check the recipe that a run has written. A link in its place is not followed. Raises UserError."""
    return read(run_dir / "recipe.yaml", raw_of_run(run_dir))


def raw_of_run(run_dir: Path) -> bytes:
    """The bytes of the recipe that a run has written. Raises UserError."""
    path = run_dir / "recipe.yaml"
    try:
        return files.read_bytes(path, safe_yaml.MAX_BYTES)
    except OSError as error:
        raise UserError(f"recipe {path} cannot be read: {error.strerror}") from None


def _section(recipe: Recipe, key: str, key_node: yaml.Node, node: yaml.Node, problems: list[str]) -> None:
    where = f"{recipe.path}:{key_node.start_mark.line + 1}"
    if key == "description":
        recipe.description = str(plain_value(node, where, key, problems))
    elif key == "defaults":
        _defaults(recipe, node, where, problems)
    elif key == "claim":
        recipe.claim = claims.Claim.read(recipe.path, key, key_node, node, problems)
    elif key == "sweep":
        for k, v in node.value if isinstance(node, yaml.MappingNode) else []:
            _axis(recipe, str(k.value), k, v, problems)
        if not isinstance(node, yaml.MappingNode) or not node.value:
            problems.append(f"{where}: sweep: must be a mapping of key → list of values")
    elif allowed_in_recipe(key, where, problems):
        _values(recipe, key, key_node, node, problems)


def _unchanged(below: Recipe, key_node: yaml.Node, node: yaml.Node, problems: list[str]) -> None:
    """Read options and values that were mere defaults, under the same rules as the rest of the file."""
    if not isinstance(node, yaml.MappingNode):
        where = f"{below.path}:{key_node.start_mark.line + 1}"
        problems.append(f"{where}: unchanged: must be a mapping of 'defaults:' and 'group: {{key: value}}' entries")
        return
    for inner, value in node.value:
        key = str(inner.value)
        if key in (*FORMS, "description", "claim", "sweep", "unchanged"):
            problems.append(f"{below.path}:{inner.start_mark.line + 1}: '{key}' cannot be in unchanged:, but beside it")
        else:
            _section(below, key, inner, value, problems)


def _take_unchanged(recipe: Recipe, below: Recipe) -> None:
    """Add what was a mere default. What the recipe says above goes before it, and may have been changed by hand."""
    kept = {key: value for key, value in below.values.items() if holds_for(key, below.choices, recipe.choices)}
    recipe.unchanged = frozenset({*below.choices, *kept} - {*recipe.choices, *recipe.values})
    recipe.choices = {**below.choices, **recipe.choices}
    recipe.values = {**kept, **recipe.values}
    recipe.lines = {**below.lines, **recipe.lines}


def holds_for(key: str, before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """True if a value that was a mere default of the options `before` is one of the options `now` too (group → option)."""
    group, _, rest = key.partition(".")
    old, new = before.get(group), now.get(group)
    if old is None or new is None or old == new:
        return True
    if isinstance(old, list) and isinstance(new, list):
        return rest.split(".")[0] in new or rest.split(".")[0] not in old
    return False


def _axis(recipe: Recipe, key: str, key_node: yaml.Node, node: yaml.Node, problems: list[str]) -> None:
    """Read one key of the sweep's grid, under the same rules as the rest of the file."""
    where = f"{recipe.path}:{key_node.start_mark.line + 1}"
    if not allowed_in_recipe(key, where, problems) or not is_plain_key(key, where, problems):
        return
    choices = plain_value(node, where, key, problems)
    recipe.sweep[key], recipe.lines[key] = choices if isinstance(choices, list) else [choices], key_node.start_mark.line + 1
    if any(names_code(key, choice) for choice in recipe.sweep[key]):  # the command line would take the place of the axis
        problems.append(f"{where}: {code_refusal(key)}")
    if not recipe.sweep[key]:
        problems.append(f"{where}: '{key}' has no values to sweep over")


def _defaults(recipe: Recipe, node: yaml.Node, where: str, problems: list[str]) -> None:
    if not isinstance(node, yaml.SequenceNode):
        problems.append(f"{where}: defaults: must be a list such as '- override /optimizer: sgd'")
        return
    for entry in node.value:
        at = f"{recipe.path}:{entry.start_mark.line + 1}"
        if isinstance(entry, yaml.ScalarNode) and entry.value == "_self_":
            continue
        pairs = entry.value if isinstance(entry, yaml.MappingNode) else []
        match = _OVERRIDE.match(str(pairs[0][0].value)) if len(pairs) == 1 else None
        if match is None:
            text = entry.value if isinstance(entry, yaml.ScalarNode) else str(pairs[0][0].value) if pairs else ""
            if str(text).lstrip("/").startswith(("override /hydra", "hydra")):
                problems.append(f"{at}: a recipe cannot set '{text}' (Hydra's settings): set it on the command line")
            else:
                problems.append(f"{at}: {text!r} in defaults: a recipe chooses options as '- override /group: option'")
            continue
        group, option = match[1], plain_value(pairs[0][1], at, match[1], problems)
        if not allowed_in_recipe(group, at, problems):
            continue
        if group in recipe.choices:
            problems.append(f"{at}: {group} is chosen twice: here and in line {recipe.lines[group]}")
        elif all(isinstance(o, str) and _OPTION.match(o) for o in (option if isinstance(option, list) else [option])):
            recipe.choices[group], recipe.lines[group] = option, entry.start_mark.line + 1
        else:
            given = "no option is given" if option is None else f"{option!r} is not the name of an option"
            problems.append(f"{at}: {group}: {given}: names are plain, never paths")


def _twice(path: Path, key_node: yaml.Node) -> str:
    return f"{path}:{key_node.start_mark.line + 1}: '{printable(str(key_node.value)):.60}' is given twice"


def _values(recipe: Recipe, key: str, key_node: yaml.Node, node: yaml.Node, problems: list[str]) -> None:
    where = f"{recipe.path}:{key_node.start_mark.line + 1}"
    if not is_plain_key(key, where, problems):
        return
    if isinstance(node, yaml.MappingNode) and node.value:
        for k, v in node.value:
            _values(recipe, f"{key}.{k.value}", k, v, problems)
    elif key in recipe.values:  # once as `a: {b: …}` and once as `a.b: …`
        if _twice(recipe.path, key_node) not in problems:
            problems.append(f"{where}: '{key}' is given twice: here and in line {recipe.lines[key]}")
    else:
        recipe.values[key], recipe.lines[key] = plain_value(node, where, key, problems), key_node.start_mark.line + 1

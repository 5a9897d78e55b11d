"""Reading a shared recipe: options and values in plain YAML, never code. Hydra sees only checked content."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from drivetrain.core.errors import UserError, refuse
from drivetrain.core.machine import files
from drivetrain.core.options.overrides import redact
from drivetrain.core.typed import JsonMapping, JsonObject
from drivetrain.recipe import claims, safe_yaml
from drivetrain.recipe.safe_yaml import RecipeKey, code_refusal, names_code
from drivetrain.recipe.write import FORMS, Header, read_header

MAX_JOBS = 1000
_OVERRIDE = re.compile(r"(?:optional\s+)?(?:override\s+)?/?([a-z_]+)$")
_OPTION = re.compile(r"[A-Za-z0-9_]+$")


@dataclass(frozen=True)
class RecipeSource:
    """The source of a recipe in a run's record: the value of `recipe=`, and the SHA-256 of the text."""

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
    claim: claims.Claim | None = None  # measured results; not part of the config
    lines: dict[str, int] = field(default_factory=dict)  # key → its line, for messages
    header: Header = field(default_factory=Header)  # only of recipes written by drivetrain
    unchanged: frozenset[str] = frozenset()  # groups and keys of `unchanged:`, mere defaults at the time of writing
    source: RecipeSource | None = None  # its origin; None for a run's own

    @property
    def word(self) -> str:
        """The word for `recipe=` that finds it again."""
        return self.source.given if self.source is not None else str(self.path)

    def where(self, key: str) -> str:
        """The file:line of a key."""
        return f"{self.path}:{self.lines.get(key, 1)}"

    def cells(self, groups: Container[str], given: Container[str] = ()) -> Iterator[tuple[JsonObject, Recipe]]:
        """Each combination of the sweep's values, and the recipe with those values set; keys in `given` are not swept."""
        axes = {key: values for key, values in self.sweep.items() if key not in given}
        if (jobs := math.prod(map(len, axes.values()))) > MAX_JOBS:
            raise UserError(f"{self.path}: its sweep has {jobs:,} jobs, but at most {MAX_JOBS:,} are allowed")
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
        """The recipe without mere defaults from the time of writing."""
        choices = {group: option for group, option in self.choices.items() if group not in self.unchanged}
        values = {key: value for key, value in self.values.items() if key not in self.unchanged}
        return replace(self, choices=choices, values=values, header=Header(), unchanged=frozenset())

    def add(self, defaults: Recipe) -> None:
        """Add the mere defaults. The recipe's own values override them, and may have been edited by hand."""
        kept = {key: value for key, value in defaults.values.items() if holds_for(key, defaults.choices, self.choices)}
        self.unchanged = frozenset({*defaults.choices, *kept} - {*self.choices, *self.values})
        self.choices = {**defaults.choices, **self.choices}
        self.values = {**kept, **self.values}
        self.lines = {**defaults.lines, **self.lines}

    def baseline(self, groups: Container[str]) -> Recipe:
        """The baseline recipe of the claim of speed, or this recipe without such a claim; from the same file, fully checked.

        A group in the claim has its option's own defaults and the claim's settings, but none of the recipe's settings.
        """
        if self.claim is None or self.claim.speed is None:
            return replace(self, claim=None)
        against = self.claim.speed.against
        chosen, others = _split(against, groups)
        kept = {key: value for key, value in self.values.items() if key.split(".")[0] not in chosen}
        changed = replace(self, choices={**self.choices, **chosen}, values={**kept, **others})
        return replace(changed, claim=None, lines={**self.lines, **against.lines}, header=Header())


def _split(given: JsonMapping, groups: Container[str]) -> tuple[JsonObject, JsonObject]:
    """The entries for options, and the entries for values."""
    return {k: v for k, v in given.items() if k in groups}, {k: v for k, v in given.items() if k not in groups}


def read(path: Path, raw: bytes | None = None) -> Recipe:
    """Read and check a recipe file, or its bytes. Raises UserError with every problem and its line."""
    root = safe_yaml.load(path, raw)
    name = f"of run {path.parent.name}" if path.name == "recipe.yaml" else path.stem
    recipe, defaults = Recipe(name, path, header=read_header(root)), Recipe(name, path)
    for entry in root.entries():
        if entry.key == "unchanged":
            _unchanged(defaults, entry)
        elif entry.key not in FORMS:
            _section(recipe, entry)
    recipe.add(defaults)
    if recipe.claim is not None and recipe.sweep:
        root.problems.append(f"{path}: a recipe with sweep: cannot have claim:, because a claim is about a single config")
    refuse(root.problems)
    return recipe


def read_of_run(run_dir: Path) -> Recipe:
    """Read and check the recipe written by a run. Links are not followed. Raises UserError."""
    return read(run_dir / "recipe.yaml", raw_of_run(run_dir))


def raw_of_run(run_dir: Path) -> bytes:
    """The bytes of the recipe written by a run. Raises UserError."""
    path = run_dir / "recipe.yaml"
    try:
        return files.read_bytes(path, safe_yaml.MAX_BYTES)
    except OSError as error:
        raise UserError(f"recipe {path} cannot be read: {error.strerror}") from None


def _section(recipe: Recipe, entry: RecipeKey) -> None:
    """Read one of a recipe's keys."""
    if entry.key == "description":
        recipe.description = str(entry.value())
    elif entry.key == "defaults":
        _defaults(recipe, entry)
    elif entry.key == "claim":
        recipe.claim = claims.Claim.read(entry)
    elif entry.key == "sweep":
        for axis in entry.mapping("key → list of values", at_least=1) or ():
            _axis(recipe, axis)
    else:
        _values(recipe, entry)


def _unchanged(recipe: Recipe, entry: RecipeKey) -> None:
    """Read options and values that were mere defaults, by the same rules as the rest of the file."""
    for inner in entry.mapping("'defaults:' and 'group: {key: value}' entries") or ():
        if inner.key in (*FORMS, "description", "claim", "sweep", "unchanged"):
            inner.refuse(f"'{inner.key}' belongs outside of unchanged:, at the same level")
        else:
            _section(recipe, inner)


def holds_for(key: str, before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """True if a mere default of the options `before` also belongs to the options `now` (group → option)."""
    group, _, rest = key.partition(".")
    old, new = before.get(group), now.get(group)
    if old is None or new is None or old == new:
        return True
    if isinstance(old, list) and isinstance(new, list):
        return rest.split(".")[0] in new or rest.split(".")[0] not in old
    return False


def _axis(recipe: Recipe, entry: RecipeKey) -> None:
    """Read one key of the sweep's grid, by the same rules as the rest of the file."""
    if not entry.may_be_set():
        return
    given = entry.value()
    recipe.sweep[entry.key], recipe.lines[entry.key] = given if isinstance(given, list) else [given], entry.line
    if any(names_code(entry.key, choice) for choice in recipe.sweep[entry.key]):  # the command line would replace the axis
        entry.refuse(code_refusal(entry.key))
    if given == []:
        entry.refuse(f"'{entry.key}' has no values to sweep over")


def _defaults(recipe: Recipe, given: RecipeKey) -> None:
    if not isinstance(given.node, yaml.SequenceNode):
        given.refuse("defaults: must be a list such as '- override /optimizer: sgd'")
        return
    for node in given.node.value:
        entry = given._replace(line=node.start_mark.line + 1, node=node)
        pairs = entry.entries()
        text = pairs[0].key if pairs else str(node.value) if isinstance(node, yaml.ScalarNode) else ""
        if match := _OVERRIDE.match(text) if len(pairs) == 1 else None:
            _choice(recipe, entry._replace(key=match[1], node=pairs[0].node))
        elif text.lstrip("/").startswith(("override /hydra", "hydra")):
            entry.refuse(f"a recipe cannot set '{text}' (Hydra's settings): set it on the command line")
        elif text != "_self_":
            entry.refuse(f"{text!r} in defaults: a recipe chooses options as '- override /group: option'")


def _choice(recipe: Recipe, entry: RecipeKey) -> None:
    """Read the option of a group."""
    group, option = entry.key, entry.value()
    if not entry.may_be_set():
        return
    if group in recipe.choices:
        entry.refuse(f"{group} is chosen twice: here and in line {recipe.lines[group]}")
    elif all(isinstance(o, str) and _OPTION.match(o) for o in (option if isinstance(option, list) else [option])):
        recipe.choices[group], recipe.lines[group] = option, entry.line
    else:
        given = "no option is given" if option is None else f"{option!r} is not the name of an option"
        entry.refuse(f"{group}: {given}: names are plain, never paths")


def _values(recipe: Recipe, entry: RecipeKey) -> None:
    """Read a value, or each value of a mapping, by dotted keys."""
    if not entry.may_be_set():
        return
    inner = entry.entries()
    for each in inner:
        _values(recipe, each.under(entry.key))
    if entry.key in recipe.values:  # once as `a: {b: …}` and once as `a.b: …`
        entry.refuse(f"'{entry.key}' is given twice: here and in line {recipe.lines[entry.key]}")
    elif not inner:
        recipe.values[entry.key], recipe.lines[entry.key] = entry.value(), entry.line

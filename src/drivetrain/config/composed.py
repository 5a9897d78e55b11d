"""A config that Hydra composed, before its options are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from omegaconf import OmegaConf

from drivetrain.core.typed import JsonObject
from drivetrain.recipe.reader import Recipe


def flatten(tree: Mapping[str, object], prefix: str = "") -> JsonObject:
    """Nested mappings as one mapping with dotted keys; an empty mapping in them counts as a value."""
    flat: JsonObject = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def references(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """The dotted key and the text of every value that refers to another, to the environment, or to anything else."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from references(below, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for number, below in enumerate(value):
            yield from references(below, f"{name}[{number}]")
    elif isinstance(value, str) and "${" in value:
        yield name, value


@dataclass
class Composed:
    """A run's config before its options are made."""

    unresolved: JsonObject  # the config as dicts and lists, with its references; only to be read
    choices: JsonObject  # group → option (a list for LISTS)
    overrides: list[str]  # the command line
    recipe: Recipe | None = None
    notices: list[str] = field(default_factory=list)  # what the user should know, one line each
    config_dirs: tuple[str, ...] = ()
    option_defaults: JsonObject = field(default_factory=dict)  # the config before any value was set
    default_choices: JsonObject = field(default_factory=dict)  # the options used if none is chosen: the task's
    problems: list[str] = field(default_factory=list)  # of the overrides; `validate` adds those of the values
    recipe_keys: set[str] = field(default_factory=set)  # keys whose values come from the recipe
    doubtful: set[str] = field(default_factory=set)  # groups, and keys of no group, with a word that was not understood
    by_operator: frozenset[str] = frozenset()  # groups whose option the command line chooses

    def choice(self, group: str) -> Any:
        """The chosen option of a group; a list for LISTS."""
        return self.choices[group]

    @cached_property  # all keys are set before its first use
    def plain(self) -> JsonObject:
        """The resolved config as dicts and lists, only to be read. Once it is checked, texts from the environment are values."""
        if not self.references:
            return self.unresolved
        return OmegaConf.to_container(OmegaConf.create(self.unresolved), resolve=True)  # type: ignore[return-value]

    def settings(self) -> JsonObject:
        """The resolved config with dotted keys, and the option of each group."""
        return {**flatten(self.plain), **self.choices}

    @cached_property
    def references(self) -> dict[str, str]:
        """Dotted key → text of every value that refers to another, to the environment, or to anything else."""
        return dict(references(self.unresolved))

    def from_environment(self, key: str) -> bool:
        """True if the value of a dotted key comes from the environment."""
        inside = (text for name, text in self.references.items() if name == key or name.startswith((f"{key}.", f"{key}[")))
        return any("${oc.env:" in text for text in inside)

    def where(self, key: str) -> str:
        """The prefix "file:line: " of a value that the recipe set, for messages; empty for any other."""
        return f"{self.recipe.where(key)}: " if self.recipe is not None and key in self.recipe_keys else ""

"""References in a recipe, as `${optimizer.lr}`: each names one plain value of the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drivetrain.recipe.reader import Recipe
from drivetrain.recipe.safe_yaml import REFERENCE


def problems(recipe: Recipe, values: Mapping[str, Any], config: DictConfig) -> Iterator[str]:
    """The references among a recipe's values that name a mapping, a list or another reference: these could grow without end.

    It is asked before the config is resolved. A reference to a key that is not there is composing's to report.
    """
    named = {key: list(_names(value)) for key, value in values.items() if recipe.values.get(key) is value}
    if not any(named.values()):
        return
    unresolved: Any = OmegaConf.to_container(config)
    for key, name in ((key, name) for key, names in named.items() for name in names):
        value = unresolved
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, dict | list) or (isinstance(value, str) and "${" in value):
            kind = "another reference" if isinstance(value, str) else "a list or a mapping"
            where = recipe.where(key)
            yield f"{where}: {key}: ${{{name}}} is {kind}: a recipe may refer to single values only: write the value out"


def _names(value: Any) -> Iterator[str]:
    """The keys that a value refers to."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _names(part)
    elif isinstance(value, str):
        yield from REFERENCE.findall(value)


def followed(value: Any, config: DictConfig) -> Any:
    """A value of a recipe, with what its references stand for."""
    if isinstance(value, list):
        return [followed(part, config) for part in value]
    if isinstance(value, dict):
        return {key: followed(part, config) for key, part in value.items()}
    if not isinstance(value, str) or "${" not in value:
        return value
    if whole := REFERENCE.fullmatch(value):
        return OmegaConf.select(config, whole[1])
    return REFERENCE.sub(lambda match: str(OmegaConf.select(config, match[1])), value)

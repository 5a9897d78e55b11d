"""Recipes: those that ship and made ones, with changes, checked as `drivetrain recipe check` does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck
from tests.support.recipe_mutants import mutants

from bench.fuzz.judged import Example
from drivetrain.launch import recipe_check
from drivetrain.launch.job import prepare
from drivetrain.recipe import reader


def examples(place: Path, count: int, seed: int) -> Iterator[Example]:
    """Yield the texts as files."""
    prepare([])  # what the first config imports and reads is no effect of a recipe
    file = place / "recipe.yaml"
    for text in texts(count, seed):
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        yield Example(f"recipe: {text[:2000]!r}", lambda: recipe_check.check(reader.read(file)), (file, Path("recipes")))


def texts(count: int, seed: int) -> list[str]:
    """So many texts of recipes, the same ones for the same seed."""
    found: list[str] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[hypothesis.Phase.generate],
    )  # fmt: skip
    @hypothesis.given(mutants())
    def keep(text: str) -> None:
        found.append(text)

    keep()
    return found[:count]

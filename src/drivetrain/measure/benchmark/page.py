"""The pages of commands that make several comparisons, as HTML."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.measure.benchmark import overview
from drivetrain.measure.benchmark.comparison import Comparison
from drivetrain.measure.benchmark.overview import headline
from drivetrain.measure.leave import origin
from drivetrain.ui.pages import blocks
from drivetrain.ui.sheet import joined


def ablation_page(recipe: str, baseline: str, comparisons: dict[str, Comparison], argv: Sequence[str]) -> str:
    """The page of `drivetrain ablate`, which begins with the answer of its first comparison."""
    about = f"What each technique of the recipe {recipe} is worth against {baseline}."
    if len(comparisons) > 1:
        about += " Where a technique gains when it is added alone, and its removal costs nothing, another makes up for it."
    first, last = next(iter(comparisons.values())), next(reversed(comparisons.values()))
    answer = headline(first)
    body = [*blocks.paragraphs([about], soft=True), *sections(comparisons, answer), *footer("ablate", last, argv)]
    return blocks.page(f"{recipe} against {baseline} – drivetrain ablate", answer, body)


def sections(comparisons: dict[str, Comparison], said: str = "") -> list[str]:
    """The comparisons under their titles, each with its answer, unless the page `said` it."""
    body: list[str] = []
    for title, comparison in comparisons.items():
        answer = headline(comparison)
        body += [blocks.heading(title), *blocks.paragraphs([answer] if answer != said else [])]
        body.append(joined(overview.sections(comparison)))
    return body


def footer(verb: str, comparison: Comparison, argv: Sequence[str]) -> list[str]:
    """The command that repeats the measurement, and the environment in which it ran."""
    return [joined(origin([verb, *argv], comparison.environment))]

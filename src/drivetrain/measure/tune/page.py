"""The HTML page of `drivetrain tune`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drivetrain.measure.benchmark.comparison import Comparison
from drivetrain.measure.benchmark.page import footer, sections
from drivetrain.measure.html import page, paragraphs, plot
from drivetrain.measure.tune import range_test
from drivetrain.measure.tune.range_test import RangeTest


def tuning_page(comparisons: dict[str, Comparison], tested: RangeTest | None, notes: Sequence[str], argv: Sequence[str]) -> str:
    """The notes, the range test if there was one, and every comparison under its title."""
    body = paragraphs(notes, bold=True)
    figures: dict[str, Any] = {}
    if tested is not None:
        body += ["<h1>Learning rate range test</h1>", *paragraphs(range_test.advice(tested)), plot("range")]
        figures["range"] = range_test.figure(tested)
    compared, drawn = sections(comparisons)
    end = footer("tune", next(reversed(comparisons.values())), argv) if comparisons else []
    return page("What makes this run faster here", [*body, *compared, *end], figures | drawn)

"""Comparisons as HTML, for pages that are not made of sections yet."""

from __future__ import annotations

from drivetrain.measure.benchmark.comparison import Comparison
from drivetrain.measure.benchmark.overview import titled
from drivetrain.ui.sheet import joined


def sections(comparisons: dict[str, Comparison]) -> list[str]:
    """The comparisons under their titles."""
    return [joined(titled(comparisons))]

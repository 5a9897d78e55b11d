"""The HTML page of `drivetrain tune`."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.measure.benchmark.comparison import Comparison
from drivetrain.measure.benchmark.page import footer, sections
from drivetrain.measure.tune import range_test
from drivetrain.measure.tune.range_test import RangeTest
from drivetrain.ui.pages import blocks, charts


def tuning_page(
    found: str, commands: Sequence[str], comparisons: dict[str, Comparison], tested: RangeTest | None, notes: Sequence[str],
    argv: Sequence[str],
) -> str:  # fmt: skip
    """What was found with its commands and notes, the comparisons, the proof first, and the range test if there was one."""
    body = [blocks.command(*commands)] if commands else []
    body += blocks.paragraphs(notes)
    ordered = dict(reversed(comparisons.items()))  # the last one is the proof
    body += sections(ordered)
    if tested is not None:
        body += [blocks.heading("Learning rate range test"), *blocks.paragraphs(range_test.advice(tested))]
        body.append(charts.grid([range_test.chart(tested)]))
    if ordered:
        body += footer("tune", next(iter(ordered.values())), argv)
    return blocks.page("What makes this run faster here – drivetrain tune", found, body)

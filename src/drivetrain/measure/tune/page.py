"""The HTML page of `drivetrain tune`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain.measure.benchmark import noninferiority
from drivetrain.measure.benchmark.comparison import Comparison
from drivetrain.measure.benchmark.page import footer, sections
from drivetrain.measure.benchmark.row import Row
from drivetrain.measure.tune import range_test
from drivetrain.measure.tune.range_test import RangeTest
from drivetrain.ui.pages import blocks, charts

if TYPE_CHECKING:
    from drivetrain.measure.tune.tune import Tuning

PROOF = "All accepted candidates, measured again"


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


def conclusion(tuning: Tuning, proof: Row | None, tested: RangeTest | None) -> str:
    """What was found, in one sentence."""
    if proof is not None and proof.gain is not None:
        speed = f"{proof.gain.middle:.2f} × as fast as it was ({proof.gain.low:.2f} to {proof.gain.high:.2f})"
        outcome = proof.verdict.outcome if proof.verdict is not None else ""
        quality = {
            noninferiority.PASS: ", and its result is no worse",
            noninferiority.INCONCLUSIVE: "; a few seeds do not tell whether its result is as good",
        }.get(outcome, "; whether its result is as good was not measured")
        return f"With {' '.join(tuning.accepted.values())} the run is {speed}{quality}"
    if tuning.comparisons:
        tried = sum(len(done.rows) - 1 for title, done in tuning.comparisons.items() if title != PROOF)
        if tuning.unfinished:
            over = f"before the search of {', '.join(dict.fromkeys(tuning.unfinished))} was done"
            return f"The time was over {over}, and none of {tried} candidates is proven to be faster: the config stays as it was"
        return f"None of the {tried} candidates is measurably faster: the config stays as it was"
    return range_test.advice(tested)[0] if tested is not None else "Nothing was searched"

"""`--recipe FILE` of the measuring verbs: hands a measured arm on as a recipe that claims what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drivetrain.measure.benchmark import noninferiority
from drivetrain.measure.benchmark.arms import ArmSpec, baseline_job
from drivetrain.measure.benchmark.compare import HandOn
from drivetrain.measure.benchmark.comparison import Comparison
from drivetrain.measure.benchmark.row import Row
from drivetrain.measure.claims import write
from drivetrain.recipe.claim import times
from drivetrain.ui.output import echo


def writer(verb: str, file: Path | None, last: bool = False) -> HandOn | None:
    """What writes FILE when a verb has measured; None without one. Raises UserError where FILE cannot be written.

    The arm is the fastest one that is faster than the first beyond doubt and did not FAIL; with `last` it is the last arm.
    """
    if file is None:
        return None
    write.check_file(file)

    def hand_on(done: Comparison, specs: Sequence[ArmSpec]) -> None:
        numbers = [len(specs) - 1] if last else range(1, len(specs))
        good = [n for n in numbers if is_proven(done.rows[n]) and specs[n].job is not None]
        if not good:
            echo(
                f"{file} is not written: no arm is faster than the first beyond doubt, with a result as good. A better result "
                "alone is not handed on: `drivetrain recipe export` claims it from runs"
            )
            return
        number = max(good, key=lambda n: done.rows[n].gain or (0.0,))
        row, job = done.rows[number], specs[number].job
        assert row.ratio is not None
        assert job is not None
        evidence = f"drivetrain {verb}: {row.label or 'it'} has {times(*row.ratio)} the samples a second of {done.rows[0].label}"
        differs = write.against(job, baseline_job(specs))
        comments = [f"{evidence}, measured in interleaved rounds", *write.of_the_run(row, done.rows[0])]
        file.write_text(write.recipe_text(job, differs, row, done.rows[0], comments), encoding="utf-8")
        echo(f"written to {file}; to check it on another machine: drivetrain recipe verify {file}")

    return hand_on


def is_proven(row: Row) -> bool:
    """Whether an arm makes the run as it is faster beyond doubt, start-up included, and its result was not found to be worse."""
    return row.gain is not None and row.gain.low > 1 and (row.verdict is None or row.verdict.outcome != noninferiority.FAIL)

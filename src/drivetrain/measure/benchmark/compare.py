"""`drivetrain compare`: techniques side by side, with intervals, and whether the result is still as good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.files import write_json
from drivetrain.launch.job import Job
from drivetrain.measure import arguments
from drivetrain.measure.benchmark import page, quality
from drivetrain.measure.benchmark.arms import ArmSpec, baseline_job, refuse_resume, swept
from drivetrain.measure.benchmark.comparison import Comparison, Settings, measure
from drivetrain.measure.benchmark.overview import headline, overview
from drivetrain.run import directory
from drivetrain.ui import terminal
from drivetrain.ui.output import echo

HandOn = Callable[[Comparison, Sequence[ArmSpec]], None]


class Compared(Comparison):
    """A comparison that a notebook shows."""

    def _repr_html_(self) -> str:
        """The answer and its table."""
        return f"<p>{escape(headline(self))}</p>{overview(self)}"


def command(argv: list[str], config_dirs: Sequence[str] = (), hand_on: HandOn | None = None) -> int:
    """Run `drivetrain compare`; return its exit code. `hand_on` is called with what was measured."""
    comparison, specs = run(argv, config_dirs)
    if hand_on is not None:
        hand_on(comparison, specs)
    return FAILED if comparison.failed else DONE


def run(argv: Sequence[str], config_dirs: Sequence[str] = ()) -> tuple[Compared, list[ArmSpec]]:
    """Compare the arms, show and save what was found, and return it. Raises UserError where there is nothing to compare."""
    settings, overrides = arguments.split(argv, Settings)
    refuse_resume("compare", overrides)
    specs, notes = swept(overrides, config_dirs)
    if len(specs) < 2:
        raise UserError("there is nothing to compare: give one key several values, as in precision=fp32,bf16")
    quality.check(settings, baseline_job(specs), settings.quality)
    for note in notes:
        echo(note)
    comparison = Compared(**vars(measure(specs, settings, overrides)))
    comparison.raise_if_baseline_failed()
    comparison.notes = notes + comparison.notes
    show(comparison)
    save(comparison, baseline_job(specs), argv)
    return comparison, specs


def save(comparison: Comparison, job: Job, argv: Sequence[str], verb: str = "compare") -> None:
    """Write compare.json and compare.html to a new folder under the run's output_dir."""
    folder = directory.create(Path(job.run.values["output_dir"]), "compare")
    write_json(folder / "compare.json", comparison.as_dict())
    (folder / "compare.html").write_text(page.comparison_page(comparison, argv, verb), encoding="utf-8")
    echo(f"written to {folder}/compare.json and compare.html")


def show(comparison: Comparison) -> None:
    """Print the table, in a narrow terminal without the columns that matter least, and the notes."""
    header, rows = comparison.table()
    rows = [rows[n] for n in comparison.order()]
    least = ("95th percentile", "waiting for data", "update, median", "memory", "samples/s", "starts in")
    left_out = terminal.fit(header, rows, least)
    terminal.table(header, rows)
    if left_out:
        echo(f"not shown here, but in the page: {', '.join(left_out)}")
    for note in [*comparison.notes, headline(comparison)]:
        echo(note)

"""`drivetrain compare`: techniques side by side, with intervals, and whether the result is still as good."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.launch.job import Job
from drivetrain.measure import arguments, leave
from drivetrain.measure.benchmark import quality
from drivetrain.measure.benchmark.arms import ArmSpec, baseline_job, refuse_resume, swept
from drivetrain.measure.benchmark.comparison import Comparison, Settings, measure
from drivetrain.measure.benchmark.overview import headline, sections
from drivetrain.ui.output import echo
from drivetrain.ui.sheet import Sheet

HandOn = Callable[[Comparison, Sequence[ArmSpec]], None]


class Compared(Comparison):
    """A comparison that a notebook shows."""

    def _repr_html_(self) -> str:
        """The answer and its table."""
        return sheet(self)._repr_html_()


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


def sheet(comparison: Comparison, verb: str = "compare") -> Sheet:
    """What a comparison found."""
    return Sheet(f"Techniques compared – drivetrain {verb}", headline(comparison), sections(comparison))


def save(comparison: Comparison, job: Job, argv: Sequence[str], verb: str = "compare") -> None:
    """Write compare.json and compare.html to a new folder under the run's output_dir."""
    command, place = [*verb.split(), *argv], leave.folder(job, "compare")
    leave.leave(place, "compare", sheet(comparison, verb), command, comparison.environment, comparison.as_dict())


def show(comparison: Comparison) -> None:
    """Print the table, in a narrow terminal without the columns that matter least, the notes and the answer."""
    sheet(comparison).show()

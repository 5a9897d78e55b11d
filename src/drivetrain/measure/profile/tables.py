"""The tables of a step's profile, for the terminal and the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from drivetrain.measure.profile.step import StepProfile

MIN_SHOWN = 0.02  # the least share of a line in the table


class Table(NamedTuple):
    """A table as text."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def of(profile: StepProfile) -> list[Table]:
    """Where an update's time goes: by its phases, and by the lines of the user's code."""
    return [_phases(profile), _lines(profile)]


def _phases(profile: StepProfile) -> Table:
    total = sum(profile.phases.values())
    rows: list[tuple[str, ...]] = [(name, f"{ms:.2f} ms", f"{ms / total:.0%}") for name, ms in profile.phases.items()]
    rows += [(name, f"{share * profile.step_ms:.2f} ms", f"{share:.0%}") for name, share in profile.utilization.items()]
    rows.append(("an update, not profiled", f"{profile.step_ms:.2f} ms", ""))
    rows.append(("an evaluation", f"{profile.evaluation_s:.2f} s", ""))
    if profile.saving_s is not None:
        rows.append(("a checkpoint", f"{1e3 * profile.saving_s:.0f} ms", ""))
    return Table(("phase", "time", "of the update"), rows)


def _lines(profile: StepProfile) -> Table:
    """The lines that an update's time goes to; their shares add up to 100 %."""
    shares = [(f"{line.place}: {line.text}", line.share, line.layers) for line in profile.lines]
    shares += [(name, share, 0.0) for name, share in profile.rest.items()]
    shown = sorted((row for row in shares if row[1] + row[2] >= MIN_SHOWN), key=lambda row: -row[1] - row[2])
    rest = 1.0 - sum(own + layers for _, own, layers in shown)
    rows: list[tuple[str, ...]] = [
        (name, f"{own:.0%}" if own else "", f"{layers:.0%}" if layers else "")
        for name, own, layers in [*shown, ("all else", rest, 0.0)]
    ]
    return Table(("your line, forward and backward", "of the update", "the layers it calls"), rows)

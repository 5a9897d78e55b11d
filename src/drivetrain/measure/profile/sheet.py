"""What the doctor found, for the terminal, the page and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain.measure.benchmark import overview
from drivetrain.measure.profile.diagnose import COMPUTE, roofline_text
from drivetrain.ui.sheet import Part, Section, Sheet, Table, commands, heading, words

if TYPE_CHECKING:
    from drivetrain.measure.profile.doctor import Diagnosis
    from drivetrain.measure.profile.step import StepProfile

MIN_SHOWN = 0.02  # the least share of a line in the table
SHARE = "of the update"


def sheet(found: Diagnosis, faster: Sequence[str] = ()) -> Sheet:
    """The verdict, the commands of a `faster` run, where an update's time goes, and what was measured."""
    body: list[Section] = [verdicts(found), *([commands(*faster)] if faster else [])]
    body += [heading("Where the time of an update goes"), *profiled(found)]
    body += overview.titled(found.comparisons)
    return Sheet("Where the time goes – drivetrain doctor", conclusion(found), body)


def conclusion(found: Diagnosis) -> str:
    """What costs the most, and what was measured to help, in one sentence."""
    verdict = found.problems[0].verdict
    verdict = verdict[:1].upper() + verdict[1:] if verdict.split(" ")[0].isalpha() else verdict  # else it begins with a key
    if not found.gains or (ratio := found.gains[0].row.ratio) is None:
        return verdict
    return f"{verdict}; {found.gains[0].overrides} makes it {ratio.as_fast()}"


def verdicts(found: Diagnosis) -> Part:
    """The evidence of the largest problem, and the other problems."""
    first, *others = found.problems
    also = [problem for problem in others if problem.name != COMPUTE]
    page = words(first.evidence, *(f"Also: {problem.verdict}: {problem.evidence}" for problem in also))
    lines = [f"also: {problem.verdict}\n  {problem.evidence}" for problem in also]
    return Part(page.html, "\n".join([f"\nverdict: {first.verdict}\n  {first.evidence}", *lines]))


def profiled(found: Diagnosis) -> list[Section]:
    """Where an update's time goes: by its phases, and by the lines of the user's code."""
    return [_phases(found.profile), words(*found.notes, roofline_text(found.profile)), _lines(found.profile)]


def _phases(profile: StepProfile) -> Table:
    total = sum(profile.phases.values())
    rows = [(name, f"{ms:.2f} ms", ms / total) for name, ms in profile.phases.items()]
    rows += [(name, f"{share * profile.step_ms:.2f} ms", share) for name, share in profile.utilization.items()]
    rows += [
        ("an update, not profiled", f"{profile.step_ms:.2f} ms", 0.0),
        ("an evaluation", f"{profile.evaluation_s:.2f} s", 0.0),
    ]
    if profile.saving_s is not None:
        rows.append(("a checkpoint", f"{1e3 * profile.saving_s:.0f} ms", 0.0))
    names, times, shares = zip(*rows, strict=True)
    return _table("Phases", {"phase": names, "time": times}, shares)


def _lines(profile: StepProfile) -> Table:
    """The lines that an update's time goes to; their shares add up to 100 %."""
    shares = [(f"{line.place}: {line.text}", line.share, line.layers) for line in profile.lines]
    shares += [(name, share, 0.0) for name, share in profile.rest.items()]
    shown = sorted((row for row in shares if row[1] + row[2] >= MIN_SHOWN), key=lambda row: -row[1] - row[2])
    shown.append(("all else", 1.0 - sum(own + layers for _, own, layers in shown), 0.0))
    names, own, layers = zip(*shown, strict=True)
    return _table(
        "Lines", {"your line, forward and backward": names}, own, {"the layers it calls": [_percent(s) for s in layers]}
    )


def _table(
    name: str, columns: dict[str, Sequence[str]], shares: Sequence[float], more: dict[str, Sequence[str]] | None = None
) -> Table:
    columns = {**columns, SHARE: [_percent(share) for share in shares], **(more or {})}
    return Table.of(columns, name=name, sortable=True, bars={SHARE: [share or None for share in shares]})


def _percent(share: float) -> str:
    return f"{share:.0%}" if share else ""

"""The HTML page of `drivetrain doctor`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.measure.benchmark.page import sections
from drivetrain.measure.profile import tables
from drivetrain.measure.profile.diagnose import roofline_text
from drivetrain.ui.pages import blocks

if TYPE_CHECKING:
    from drivetrain.measure.profile.doctor import Diagnosis

COMPUTE = "compute"  # the problem of a step that has none


def doctor_page(found: Diagnosis, commands: Sequence[str], about: dict[str, Any], argv: Sequence[str]) -> str:
    """The verdict, what helps, where an update's time goes, and what was measured; `about` is the environment."""
    first, *others = found.problems
    body = [*blocks.paragraphs([first.evidence]), *([blocks.command(*commands)] if commands else [])]
    also = [f"Also: {problem.verdict}: {problem.evidence}" for problem in others if problem.name != COMPUTE]
    body += [*blocks.paragraphs(also), *blocks.paragraphs(found.notes), blocks.heading("Where the time of an update goes")]
    for (header, rows), name in zip(tables.of(found.profile), ("Phases", "Lines"), strict=True):
        bars = [float(row[at].rstrip("%")) if (at := header.index("of the update")) and row[at] else None for row in rows]
        body.append(blocks.table(header, rows, (), True, bars={"of the update": bars}, name=name) + "<p></p>")
    body += [*blocks.paragraphs([roofline_text(found.profile)]), *sections(found.comparisons)]
    body += [blocks.heading("How to reproduce it"), blocks.command(f"drivetrain doctor {shlex.join(argv)}".strip())]
    body += [blocks.heading("Where it ran"), blocks.facts(_facts(about), "Versions and machine")]
    return blocks.page("Where the time goes – drivetrain doctor", conclusion(found), body)


def conclusion(found: Diagnosis) -> str:
    """What costs the most, and what was measured to help, in one sentence."""
    verdict = found.problems[0].verdict
    verdict = verdict[:1].upper() + verdict[1:] if verdict.split(" ")[0].isalpha() else verdict  # else it begins with a key
    if not found.gains or (ratio := found.gains[0].row.ratio) is None:
        return verdict
    speed = f"{ratio.middle:.2f} × as fast ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{verdict}; {found.gains[0].overrides} makes it {speed}"


def _facts(about: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(k, str(about[k])) for k in ("drivetrain", "python", "platform", "processor", "git_commit") if about[k]]
    return rows + [(name, str(version)) for name, version in about["versions"].items()]

"""What a bisection found: in the terminal, as bisect.json and as a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drivetrain.core.files import write_json
from drivetrain.launch.job import Job
from drivetrain.measure.bisect.changes import Change
from drivetrain.measure.bisect.measurers import Fails, Quality, Settings, Speed, Subsets
from drivetrain.measure.bisect.search import NONE, Answer, Cause, Measured, Search
from drivetrain.measure.intervals import Interval
from drivetrain.recipe.safe_yaml import printable
from drivetrain.run import directory, environment
from drivetrain.ui import terminal
from drivetrain.ui.output import echo
from drivetrain.ui.pages import blocks as pages


@dataclass
class Report:
    """A finished bisection."""

    good: str
    bad: str
    subsets: Subsets
    search: Search
    answer: Answer
    measurer: Speed | Quality | Fails
    notes: list[str]
    seconds: float

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of what was tried, in the order of the comparisons."""
        header = ["changes on top of GOOD", self.measurer.unit, "95 % interval", "of the difference", "pairs", "because"]
        rows = [self._row(numbers(chosen), found) for chosen, found in self.search.tried.items() if found.pairs or found.problem]
        used = [n for n in range(len(header)) if n < 2 or any(cells[n] for cells in rows)]
        return [header[n] for n in used], [[cells[n] for n in used] for cells in rows]

    def _row(self, name: str, found: Measured) -> list[str]:
        if found.effect is None:
            return [name, "–", "", "", str(found.pairs or ""), printable(found.problem)]
        whole = self.answer.whole.effect.middle if self.answer.whole.effect is not None else 0.0
        share = f"{round(100 * found.effect.middle / whole)} %" if whole and self.answer.outcome != NONE else ""
        return [name, *self.measurer.shown(found.effect), share, str(found.pairs), printable(found.problem)]

    def conclusion(self) -> list[str]:
        """The answer, one sentence a line."""
        answer, search = self.answer, self.search
        cost = f"{search.comparisons} comparisons, {sum(f.pairs for f in search.tried.values())} pairs, {self.seconds:.0f} s"
        if answer.outcome == NONE:
            return [f"none: they do not differ ({self._figures(answer.whole)}; {cost})"]
        lines = [f"{', '.join(self._keys(cause.changes))}: {self._of(cause)}" for cause in answer.causes]
        if answer.rest is not None and answer.causes:
            lines.append(f"BAD without {'it' if len(answer.causes) == 1 else 'these'}: {self._figures(answer.rest)}")
        if answer.reason:
            what = "whether anything else matters is not resolved" if answer.causes else "not resolved within the budget"
            suspects = ", ".join(self._keys(answer.suspects))
            more = "" if isinstance(self.measurer, Fails) else " (rounds=, seeds= and budget_s= allow more)"
            lines.append(f"{what}: {answer.reason}{more}; what is left to suspect: {suspects}")
        return [*lines, f"found by {cost}; BAD: {self._figures(answer.whole)}"]

    def as_dict(self, settings: Settings, facts: dict[str, Any]) -> dict[str, Any]:
        """The content of bisect.json."""
        answer, changes = self.answer, self.subsets.numbered
        causes = [
            {
                "changes": self._keys(cause.changes), "effect": self._plain(cause.effect),
                "overrides": self.subsets.changes.overrides([changes[number] for number in cause.changes]),
            }
            for cause in answer.causes
        ]  # fmt: skip
        tried = [
            {"changes": self._keys(sorted(chosen)), **asdict(found), "effect": self._plain(found.effect)}
            for chosen, found in self.search.tried.items()
        ]
        return {
            "good": self.good, "bad": self.bad, "outcome": answer.outcome, "unit": self.measurer.unit, "causes": causes,
            "whole": self._plain(answer.whole.effect), "rest": self._plain(answer.rest.effect) if answer.rest else None,
            "suspects": self._keys(answer.suspects), "reason": answer.reason, "notes": self.notes,
            "changes": [{"key": c.key, "good": c.good, "bad": c.bad} for c in changes], "tried": tried,
            "comparisons": self.search.comparisons, "seconds": self.seconds, "settings": asdict(settings), "environment": facts,
        }  # fmt: skip

    def _of(self, cause: Cause) -> str:
        """A cause's effect in words."""
        how = "alone" if len(cause.changes) == 1 else "together, and none of them is enough without the others"
        return f"on top of GOOD {how}: {self._figures(self.search.tried[frozenset(cause.changes)])}"

    def _figures(self, found: Measured) -> str:
        if found.effect is None:
            return found.problem
        middle, interval = self.measurer.shown(found.effect)
        return f"{middle} {self.measurer.unit} ({interval})" if interval else middle

    def _keys(self, chosen: Iterable[int]) -> list[str]:
        return [self.subsets.numbered[number].key for number in chosen]

    def _plain(self, effect: Interval | None) -> list[float | None] | None:
        """An effect as JSON has it: estimate, low, high; null for a bound where there were too few pairs."""
        return [value if abs(value) != float("inf") else None for value in effect] if effect is not None else None


def numbers(chosen: Iterable[int]) -> str:
    """The numbers of changes, counted from 1, as ranges: 1–3, 5."""
    ranges: list[list[int]] = []
    for number in sorted(chosen):
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] = number + 1
        else:
            ranges.append([number + 1, number + 1])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in ranges)


def heading(changes: Sequence[Change]) -> list[str]:
    """The changes with their numbers, a line each."""
    width = max(len(change.key) for change in changes)
    return [
        printable(f"{number:4d}  {change.key:<{width}}  {change.good} → {change.bad}") for number, change in enumerate(changes, 1)
    ]


def show(report: Report) -> None:
    """Print the table and the answer."""
    echo()
    terminal.table(*report.table())
    echo()
    echo("\n".join(report.conclusion()))


def save(report: Report, bad: Job, settings: Settings, argv: Sequence[str]) -> None:
    """Write bisect.json and bisect.html to a new folder under the run's output_dir."""
    folder = directory.create(Path(bad.run.values["output_dir"]), "bisect")
    facts = environment.describe(list(argv), bad.config_hash, {})
    write_json(folder / "bisect.json", report.as_dict(settings, facts))
    (folder / "bisect.html").write_text(_page(report, argv), encoding="utf-8")
    echo(f"written to {folder}/bisect.json and bisect.html")


def _page(report: Report, argv: Sequence[str]) -> str:
    """The answer, what was tried, and the changes by their numbers."""
    rows = [(str(number), c.key, c.good, c.bad) for number, c in enumerate(report.subsets.numbered, 1)]
    answer, *more = report.conclusion()
    body = [
        *pages.paragraphs([*more, *report.notes]),
        pages.heading("What was tried"),
        pages.table(*report.table(), text=("because",), sortable=True, name="What was tried"),
        pages.heading("The changes"),
        pages.table(("number", "change", "GOOD", "BAD"), rows, ("change", "GOOD", "BAD"), name="The changes"),
        pages.heading("How to reproduce it"),
        pages.command(f"drivetrain bisect {shlex.join(argv)}"),
    ]
    return pages.page(f"What makes {report.bad} differ from {report.good} – drivetrain bisect", answer, body)

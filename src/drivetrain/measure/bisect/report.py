"""What a bisection found: in the terminal, as bisect.json and as a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drivetrain.measure.bisect.measurers import Measurer, Settings, Subsets, numbers
from drivetrain.measure.bisect.search import NONE, Answer, Measured, Search
from drivetrain.measure.changes import Change
from drivetrain.measure.intervals import Interval
from drivetrain.recipe.safe_yaml import printable
from drivetrain.ui.sheet import Section, Sheet, Table, folded, words


@dataclass
class Report:
    """A finished bisection."""

    good: str
    bad: str
    subsets: Subsets
    search: Search
    answer: Answer
    measurer: Measurer
    notes: list[str]
    seconds: float

    def table(self) -> Table:
        """What was tried, in the order of the comparisons."""
        header = ["changes on top of GOOD", self.measurer.unit, "95 % interval", "of the difference", "pairs", "because"]
        rows = [self._row(numbers(chosen), found) for chosen, found in self.search.tried.items() if found.pairs or found.problem]
        return Table(header, rows, "What was tried", ("because",), sortable=True).used(always=2)

    def _row(self, name: str, found: Measured) -> list[str]:
        middle, interval, *_ = (*self.measurer.shown(found), "", "")
        whole = self.answer.whole.effect.middle if self.answer.whole.effect is not None else 0.0
        of_whole = found.effect is not None and whole and self.answer.outcome != NONE
        share = f"{round(100 * found.effect.middle / whole)} %" if found.effect is not None and of_whole else ""
        return [name, middle or "–", interval, share, str(found.pairs or ""), printable(found.problem)]

    def sheet(self) -> Sheet:
        """The answer, what was tried, and the changes by their numbers."""
        rows = [(str(number), c.key, c.good, c.bad) for number, c in enumerate(self.subsets.numbered, 1)]
        changes = Table(("number", "change", "GOOD", "BAD"), rows, "The changes", ("change", "GOOD", "BAD"))
        answer, *more = self.conclusion()
        sections: list[Section] = [self.table(), words(*more, *self.notes), folded("The changes", [changes], is_open=True)]
        return Sheet(f"What makes {self.bad} differ from {self.good} – drivetrain bisect", answer, sections)

    def conclusion(self) -> list[str]:
        """The answer, one sentence a line."""
        answer, search = self.answer, self.search
        cost = f"{search.comparisons} comparisons, {sum(f.pairs for f in search.tried.values())} pairs, {self.seconds:.0f} s"
        if answer.outcome == NONE:
            return [f"none: they do not differ ({self._figures(answer.whole)}; {cost})"]
        lines = []
        for cause in answer.causes:
            how = "alone" if len(cause.changes) == 1 else "together, and none of them is enough without the others"
            figures = self._figures(self.search.tried[frozenset(cause.changes)])
            lines.append(f"{', '.join(self._keys(cause.changes))}: on top of GOOD {how}: {figures}")
        if answer.rest is not None and answer.causes:
            lines.append(f"BAD without {'it' if len(answer.causes) == 1 else 'these'}: {self._figures(answer.rest)}")
        if answer.reason:
            what = "whether anything else matters is not resolved" if answer.causes else "not resolved within the budget"
            suspects = ", ".join(self._keys(answer.suspects))
            more = "" if self.measurer.fails else " (rounds=, seeds= and budget_s= allow more)"
            lines.append(f"{what}: {answer.reason}{more}; what is left to suspect: {suspects}")
        return [*lines, f"found by {cost}; BAD: {self._figures(answer.whole)}"]

    def as_dict(self, settings: Settings, facts: dict[str, Any]) -> dict[str, Any]:
        """The content of bisect.json."""
        answer, changes = self.answer, self.subsets.numbered
        causes = [
            {
                "changes": self._keys(cause.changes), "effect": _plain(cause.effect),
                "overrides": self.subsets.changes.overrides([changes[number] for number in cause.changes]),
            }
            for cause in answer.causes
        ]  # fmt: skip
        tried = [
            {"changes": self._keys(sorted(chosen)), **asdict(found), "effect": _plain(found.effect)}
            for chosen, found in self.search.tried.items()
        ]
        return {
            "good": self.good, "bad": self.bad, "outcome": answer.outcome, "unit": self.measurer.unit, "causes": causes,
            "whole": _plain(answer.whole.effect), "rest": _plain(answer.rest.effect) if answer.rest else None,
            "suspects": self._keys(answer.suspects), "reason": answer.reason, "notes": self.notes,
            "changes": [{"key": c.key, "good": c.good, "bad": c.bad} for c in changes], "tried": tried,
            "comparisons": self.search.comparisons, "seconds": self.seconds, "settings": asdict(settings), "environment": facts,
        }  # fmt: skip

    def _figures(self, found: Measured) -> str:
        middle, *interval = self.measurer.shown(found) or (found.problem,)
        return f"{middle} {self.measurer.unit} ({interval[0]})" if interval else middle

    def _keys(self, chosen: Iterable[int]) -> list[str]:
        return [self.subsets.numbered[number].key for number in chosen]


def _plain(effect: Interval | None) -> list[float | None] | None:
    """An effect as JSON has it: estimate, low, high; null for a bound where there were too few pairs."""
    return [value if math.isfinite(value) else None for value in effect] if effect is not None else None


def heading(changes: Sequence[Change]) -> list[str]:
    """The changes with their numbers, a line each."""
    width = max(len(change.key) for change in changes)
    return [
        printable(f"{number:4d}  {change.key:<{width}}  {change.good} → {change.bad}") for number, change in enumerate(changes, 1)
    ]

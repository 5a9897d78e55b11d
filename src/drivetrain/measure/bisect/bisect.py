"""`drivetrain bisect`: which of the changes from GOOD to BAD make it slower, or its result worse."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.overrides import format_value
from drivetrain.launch.job import Job
from drivetrain.measure import arguments, leave
from drivetrain.measure.benchmark.arms import refuse_resume
from drivetrain.measure.bisect.measurers import (
    LEAST_ROUNDS,
    LEAST_SEEDS,
    GoodFails,
    Measurer,
    Quality,
    Settings,
    Speed,
    Subsets,
    numbers,
    read_side,
)
from drivetrain.measure.bisect.search import FAILS, NONE, UNRESOLVED, Answer, Measured, Search
from drivetrain.measure.changes import Change, Changes, in_order
from drivetrain.measure.intervals import Interval
from drivetrain.recipe.safe_yaml import printable
from drivetrain.run import environment
from drivetrain.run.identity import flatten
from drivetrain.ui.output import echo
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


SAME_DATA = ("task", "data")  # groups whose options the two must share
NOT_TOLD = ("output_dir", "recipe", "resume", "resume_changed")  # if they differ
NEVER_TRIED = (*NOT_TOLD, "trust", "select", "logger")
# How long a run is, and its random numbers: a step is as fast with others.
NOT_OF_SPEED = ("epochs", "updates", "evaluate_every", "stop", "runtime.seed")
NOT_OF_QUALITY = ("runtime.seed", "saving")  # seeds are paired, and a saved run learns nothing from that


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain bisect`; return its exit code."""
    settings, words = arguments.split(argv, Settings)
    _check(settings, words)
    subsets, bad, notes = prepare(words, config_dirs, settings.quality)
    began = time.monotonic()
    until = began + settings.budget_s
    measurer: Measurer = (Quality if settings.quality else Speed)(subsets, settings, until)
    echo("\n".join([*heading(subsets.numbered), *notes]))
    try:
        answer = (search := Search(len(subsets.numbered), measurer)).run()
        if answer.outcome == FAILS:
            echo(f"BAD does not run to a figure ({answer.whole.problem}): what makes it fail?")
            measurer.fails, measurer.unit = True, "runs"
            answer = (search := Search(len(subsets.numbered), measurer)).run()
    except GoodFails as error:
        echo(f"error: {words[0]} itself does not run, so nothing can be compared to it: {error}", file=sys.stderr)
        return FAILED
    found = Report(words[0], words[1], subsets, search, answer, measurer, notes, time.monotonic() - began)
    sheet, about = found.sheet(), environment.describe(list(argv), bad.config_hash, {})
    echo()
    sheet.show()
    leave.leave(leave.folder(bad, "bisect"), "bisect", sheet, ["bisect", *argv], about, found.as_dict(settings, about))
    return FAILED if answer.outcome == UNRESOLVED else DONE


def prepare(words: Sequence[str], config_dirs: Sequence[str], quality: bool) -> tuple[Subsets, Job, list[str]]:
    """GOOD and the changes that lead to BAD, BAD's job, and what the user should know. Raises UserError."""
    both, problems = [], []
    for word in words[:2]:
        try:
            side = read_side(word, words[2:], config_dirs)
            both.append((side, side.job()))
        except UserError as error:
            problems += [problem if word in problem else f"{word}: {problem}" for problem in error.problems]
    if problems:
        raise UserError(dict.fromkeys(problems))
    (side, job), (_, other) = both
    if different := list(_different_data(job, other)):
        raise UserError(different)
    changes = Changes(job, other, {*NEVER_TRIED, *(NOT_OF_QUALITY if quality else NOT_OF_SPEED)})
    found = changes.found()
    not_tried = [key for key in changes.not_made if key not in NOT_TOLD]
    if not found:
        raise UserError(_same(words, not_tried, quality))
    subsets = Subsets(side, changes, list(_common(words[2:], found, job, other)))
    refusals: dict[str, str] = {}

    def can_run(chosen: Sequence[Change]) -> bool:
        variant = subsets.of(chosen)
        for problem in variant.problems[:1]:
            refusals.setdefault(chosen[-1].key, problem)
        return variant.job is not None

    subsets.numbered = in_order(found, can_run)
    notes = [f"kept together: {c.key} ({refusals.get(c.parts[0].key, '')})" for c in subsets.numbered if c.parts]
    if not_tried:
        notes.append(f"not tried, though they differ: {', '.join(not_tried)}")
    whole = subsets.variant(frozenset(range(len(subsets.numbered))))
    if whole.job is None:
        raise UserError(whole.problems)
    if left := [key for key in changes.left_over(whole.job) if not key.startswith("saving")]:
        raise UserError(f"{words[1]} cannot be reached from {words[0]} by overrides: they still differ in {', '.join(left)}")
    return subsets, whole.job, notes


def _check(settings: Settings, words: Sequence[str]) -> None:
    """Raise UserError for words that are not GOOD, BAD and overrides, and for too few rounds or seeds."""
    refuse_resume("bisect", words)
    if len(words) < 2:
        raise UserError(
            f"drivetrain bisect wants GOOD and BAD, each a run's directory, a recipe or overrides in quotes: given {len(words)}"
        )
    if wrong := [word for word in words[2:] if "=" not in word]:
        raise UserError(f"'{wrong[0]}': after GOOD and BAD come overrides of both, of the form key=value")
    for name, count, least in (("rounds", settings.rounds, LEAST_ROUNDS), ("seeds", settings.seeds, LEAST_SEEDS)):
        if count < least:
            raise UserError(f"{name}={count}: fewer than {least} {name} give no interval to judge by: set {name}={least}")


def _different_data(good: Job, bad: Job) -> Iterator[str]:
    """Why the two are about different data, whose figures nobody can compare."""
    local = {key for key in good.machine_local_keys | bad.machine_local_keys if key.startswith("data.")}
    old, new = ({**job.composed.choices, **flatten(job.composed.plain)} for job in (good, bad))
    for key in (*SAME_DATA, *sorted(local)):
        if old.get(key) != new.get(key):
            hint = f"give both the same, as {key}={format_value(new.get(key))} after them"
            yield f"the two are about different data: {key}={old.get(key)} and {key}={new.get(key)}: {hint}"


def _same(words: Sequence[str], not_tried: Sequence[str], quality: bool) -> str:
    """The message that there is nothing to bisect."""
    if not_tried:
        several = len(not_tried) > 1
        no_speed = f"{'do' if several else 'does'} not change how fast a step is: quality=true bisects the result"
        reason = f"change{'' if several else 's'} no result" if quality else no_speed
        return f"{words[0]} and {words[1]} differ only in {', '.join(not_tried)}, which {reason}"
    hint = f"`drivetrain recipe diff {words[0]} {words[1]}` shows where they ran" if "=" not in words[0] + words[1] else ""
    return f"{words[0]} and {words[1]} are the same config, so no change can make a difference" + (hint and f": {hint}")


def _common(words: Sequence[str], found: Sequence[Change], good: Job, bad: Job) -> list[str]:
    """The overrides of every arm: no trackers, no checkpoints unless saving is one of the changes, and both sides' trust."""
    given = {word.partition("=")[0].split(".")[0] for word in words}
    common = ["logger=[files]"] if "logger" not in given else []
    if "saving" not in {*given, *(change.key.split(".")[0] for change in found)}:
        common.append("saving=none")
    trust = list(dict.fromkeys([*good.run.values["trust"], *bad.run.values["trust"]]))
    return [*common, *([f"trust=[{','.join(trust)}]"] if trust else [])]

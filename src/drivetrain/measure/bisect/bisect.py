"""`drivetrain bisect`: finds the changes from GOOD to BAD that make a run slower, or its result worse."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from drivetrain.config.hydra_words import recipe_word, translated
from drivetrain.core.errors import DONE, FAILED, UserError, printable, refuse
from drivetrain.core.machine.paths import expanded
from drivetrain.core.typed import JsonObject
from drivetrain.launch.job import Job, is_of_this_user, of_run, recorded_environment, recorded_settings
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure import verbs
from drivetrain.measure.benchmark.variants import VariantSpec, baseline_job
from drivetrain.measure.bisect.search import (
    FAILS,
    LEAST_ROUNDS,
    LEAST_SEEDS,
    NONE,
    UNRESOLVED,
    BisectSettings,
    ChangeSearch,
    GoodFails,
    Measured,
    Measurer,
    QualityMeasurer,
    Subsets,
    tried,
)
from drivetrain.measure.changes import Change, Changes, in_order
from drivetrain.recipe import lookup
from drivetrain.run import environment
from drivetrain.ui import sheet
from drivetrain.ui.output import echo

SAME_DATA = ("task", "data")  # groups whose options the two must share
NOT_TOLD = ("output_dir", "recipe", "resume", "resume_changed")  # if they differ
NEVER_TRIED = (*NOT_TOLD, "trust", "select", "logger")
# The length of a run and its random numbers do not change the speed of a step.
NOT_OF_SPEED = ("epochs", "updates", "evaluate_every", "evaluate_batch", "stop", "runtime.seed")
NOT_OF_QUALITY = ("runtime.seed", "saving")  # seeds are paired, and saving does not change the training


def read_side(word: str, overrides: Sequence[str], config_dirs: Sequence[str]) -> VariantSpec:
    """GOOD or BAD from its word in the command line, with the overrides common to both. Raises UserError.

    The overrides of a run come on top of its own config.
    """
    path, own = expanded(word), []
    composes: Callable[[Sequence[str]], Job] = partial(prepare_job, config_dirs=config_dirs)
    if "=" in word and not os.path.exists(path) and not lookup.is_address(word):
        try:
            own = translated(shlex.split(word), config_dirs)  # quotes within the word are the shell's
        except ValueError as error:
            raise UserError(f"'{word}' is no list of overrides: {error}") from None
        refuse(f"'{override}' in '{word}' is not of the form key=value" for override in own if "=" not in override)
    elif path.is_dir():
        recorded = recorded_environment(path)
        ours = recorded if is_of_this_user(recorded) else {}
        dirs = config_dirs or ours.get("config_dirs", [])
        composes = lambda given: of_run(path, given, dirs, recorded_settings(ours, given))  # noqa: E731
    else:
        own = [f"recipe={recipe_word(word, config_dirs)}"]
    given = [*own, *overrides]
    return VariantSpec(word, given, composes(given), composes=composes)


def sheet_of(search: ChangeSearch, seconds: float) -> sheet.Sheet:
    """The answer, the trials, and the numbered changes."""
    subsets = search.measurer.subsets
    answer, *more = conclusion(search, seconds)
    changes = sheet.folded("The changes", [table_of(subsets.numbered)], is_open=True)
    sections: list[sheet.Section] = [tried(search), sheet.words(*more, *subsets.notes), changes]
    return sheet.Sheet(f"What makes {subsets.bad.label} differ from {subsets.good.label} – drivetrain bisect", answer, sections)


def conclusion(search: ChangeSearch, seconds: float) -> list[str]:
    """The answer, one sentence a line."""
    measurer, keys = search.measurer, search.measurer.subsets.keys

    def figures(found: Measured) -> str:
        middle, *interval = measurer.shown(found) or (found.problem,)
        return f"{middle} {measurer.unit} ({interval[0]})" if interval else middle

    cost = f"{search.comparisons} comparisons, {sum(f.pairs for f in search.tried.values())} pairs, {seconds:.0f} s"
    if search.outcome == NONE:
        return [f"none: they do not differ ({figures(search.whole)}; {cost})"]
    lines = []
    for cause in search.causes:
        how = "alone" if len(cause) == 1 else "together, and none of them is enough without the others"
        lines.append(f"{', '.join(keys(cause))}: on top of GOOD {how}: {figures(search.tried[frozenset(cause)])}")
    if search.rest is not None and search.causes:
        lines.append(f"BAD without {'it' if len(search.causes) == 1 else 'these'}: {figures(search.rest)}")
    if search.reason:
        what = "whether anything else matters is not resolved" if search.causes else "not resolved within the budget"
        more = "" if measurer.fails else " (rounds=, seeds= and budget_s= allow more)"
        lines.append(f"{what}: {search.reason}{more}; what is left to suspect: {', '.join(keys(search.suspects))}")
    return [*lines, f"found by {cost}; BAD: {figures(search.whole)}"]


def as_dict(search: ChangeSearch, seconds: float, facts: JsonObject) -> JsonObject:
    """The content of bisect.json. An effect is [estimate, low, high]; a bound is null if there were too few pairs."""
    subsets, keys = search.measurer.subsets, search.measurer.subsets.keys

    def plain(found: Measured | None) -> list[float | None] | None:
        effect = found.effect if found is not None else None
        return [value if math.isfinite(value) else None for value in effect] if effect is not None else None

    causes = [
        {
            "changes": keys(cause), "effect": plain(search.tried[frozenset(cause)]),
            "overrides": subsets.changes.overrides([subsets.numbered[number] for number in cause]),
        }
        for cause in search.causes
    ]  # fmt: skip
    return {
        "good": subsets.good.label, "bad": subsets.bad.label, "outcome": search.outcome, "unit": search.measurer.unit,
        "causes": causes, "whole": plain(search.whole), "rest": plain(search.rest), "suspects": keys(search.suspects),
        "reason": search.reason, "notes": subsets.notes,
        "changes": [{"key": c.key, "good": c.good, "bad": c.bad} for c in subsets.numbered],
        "tried": [
            {"changes": keys(sorted(chosen)), **asdict(found), "effect": plain(found)} for chosen, found in search.tried.items()
        ],
        "comparisons": search.comparisons, "seconds": seconds, "settings": asdict(search.measurer.settings),
        "environment": facts,
    }  # fmt: skip


def table_of(changes: Sequence[Change]) -> sheet.Table:
    """The changes with their numbers."""
    rows = [(str(number), *map(printable, (c.key, c.good, c.bad))) for number, c in enumerate(changes, 1)]
    return sheet.Table(("number", "change", "GOOD", "BAD"), rows, "The changes", ("change", "GOOD", "BAD"))


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain bisect`; return its exit code."""
    settings, words = verbs.split(argv, BisectSettings, "bisect")
    _check(settings, words)
    subsets = prepare(words, config_dirs, settings.quality)
    began, bad = time.monotonic(), baseline_job([subsets.bad])
    measurer = (QualityMeasurer if settings.quality else Measurer)(subsets, settings, began + settings.budget_s)
    table_of(subsets.numbered).show()
    for note in subsets.notes:
        echo(note)
    try:
        if (search := ChangeSearch(len(subsets.numbered), measurer)).run() == FAILS:
            echo(f"BAD does not run to a figure ({search.whole.problem}): what makes it fail?")
            measurer.fails, measurer.unit = True, "runs"
            (search := ChangeSearch(len(subsets.numbered), measurer)).run()
    except GoodFails as error:
        echo(f"error: {words[0]} itself does not run, so nothing can be compared to it: {error}", file=sys.stderr)
        return FAILED
    seconds = time.monotonic() - began
    content = as_dict(search, seconds, environment.describe(list(argv), bad.config_hash, {}))
    echo()
    verbs.leave(bad, "bisect", sheet_of(search, seconds), ["bisect", *argv], content)
    return FAILED if search.outcome == UNRESOLVED else DONE


def prepare(words: Sequence[str], config_dirs: Sequence[str], quality: bool) -> Subsets:
    """GOOD, and the changes that lead to BAD. Raises UserError."""
    sides, problems = [], []
    for word in words[:2]:
        try:
            sides.append(read_side(word, words[2:], config_dirs))
        except UserError as error:
            problems += [problem if word in problem else f"{word}: {problem}" for problem in error.problems]
    refuse(problems)
    good, bad = (baseline_job([side]) for side in sides)
    skipped = {*NEVER_TRIED, *(NOT_OF_QUALITY if quality else NOT_OF_SPEED)}
    changes = Changes(good, bad, skipped)
    found = changes.found()
    of_data = {*SAME_DATA, *(key for key in good.machine_local_keys | bad.machine_local_keys if key.startswith("data."))}
    refuse(
        f"the two are about different data: {c.key}={c.good} and {c.key}={c.bad}: give both the same, as {c.key}={c.bad} "
        "after them"
        for c in found
        if c.key in of_data
    )
    not_tried = [key for key in changes.not_made if key not in NOT_TOLD]
    if not found:
        raise UserError(_same(words, not_tried, quality))
    subsets = Subsets(sides[0], sides[1], changes, list(_common(words[2:], found, good, bad)), config_dirs)
    refusals: dict[str, str] = {}

    def can_run(chosen: Sequence[Change]) -> bool:
        variant = subsets.of(chosen)
        for problem in variant.problems[:1]:
            refusals.setdefault(chosen[-1].key, problem)
        return variant.job is not None

    subsets.numbered = in_order(found, can_run)
    subsets.notes = [f"kept together: {c.key} ({refusals.get(c.parts[0].key, '')})" for c in subsets.numbered if c.parts]
    if not_tried:
        subsets.notes.append(f"not tried, though they differ: {', '.join(not_tried)}")
    whole = subsets.variant(range(len(subsets.numbered)))
    if whole.job is None:
        raise UserError(whole.problems)
    if left := [c.key for c in Changes(whole.job, bad, skipped).found() if not c.key.startswith("saving")]:
        raise UserError(f"{words[1]} cannot be reached from {words[0]} by overrides: they still differ in {', '.join(left)}")
    subsets.bad.job = whole.job
    return subsets


def _check(settings: BisectSettings, words: Sequence[str]) -> None:
    """Raise UserError for words that are not GOOD, BAD and overrides, and for too few rounds or seeds."""
    if len(words) < 2:
        raise UserError(
            f"drivetrain bisect wants GOOD and BAD, each a run's directory, a recipe or overrides in quotes: given {len(words)}"
        )
    refuse(f"'{word}': after GOOD and BAD come overrides of both, of the form key=value" for word in words[2:] if "=" not in word)
    counts = ("rounds", settings.rounds, LEAST_ROUNDS), ("seeds", settings.seeds, LEAST_SEEDS)
    refuse(
        f"{name}={n}: fewer than {least} {name} give no interval: set {name}={least}" for name, n, least in counts if n < least
    )


def _same(words: Sequence[str], not_tried: Sequence[str], quality: bool) -> str:
    """The message that there is nothing to bisect."""
    if not_tried:
        no_effect = "no result depends on it" if quality else "a step is as fast with either: quality=true bisects the result"
        return f"{words[0]} and {words[1]} differ only in {', '.join(not_tried)}: {no_effect}"
    hint = f"`drivetrain recipe diff {words[0]} {words[1]}` shows where they ran" if "=" not in words[0] + words[1] else ""
    return f"{words[0]} and {words[1]} are the same config, so no change can make a difference" + (hint and f": {hint}")


def _common(words: Sequence[str], found: Sequence[Change], good: Job, bad: Job) -> list[str]:
    """The overrides of every variant: no trackers, no checkpoints unless saving is one of the changes, and both sides' trust."""
    given = {word.partition("=")[0].split(".")[0] for word in words}
    common = ["logger=[files]"] if "logger" not in given else []
    if "saving" not in {*given, *(change.key.split(".")[0] for change in found)}:
        common.append("saving=none")
    trust = list(dict.fromkeys([*good.run.values["trust"], *bad.run.values["trust"]]))
    return [*common, *([f"trust=[{','.join(trust)}]"] if trust else [])]

"""`drivetrain compare`: techniques side by side, in turns, with intervals; and whether the result is still right."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drivetrain import sweep
from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.files import write_json
from drivetrain.core.option import Count, Positive
from drivetrain.core.overrides import key_of
from drivetrain.core.signals import ended_by_signals
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure import arguments
from drivetrain.measure.benchmark import noninferiority, stopping
from drivetrain.measure.benchmark.interleave import Arm, Leaving, take_turns
from drivetrain.measure.intervals import Interval, ratio
from drivetrain.recipe.reader import Recipe
from drivetrain.run import directory, environment
from drivetrain.ui import terminal
from drivetrain.ui.progress import Steps

OWN = ("saving=none",)  # an arm's, where nothing is said of saving: it leaves nothing behind


@dataclass
class Settings:
    """What the command itself can be told."""

    rounds: Count = 20  # at most, each with fresh processes; below 6 there is no interval
    turn_s: Positive = 0.4  # of timed updates, twice for each round and arm
    quality: bool = False  # train each arm to its end too, with several seeds
    seeds: Count = 5


@dataclass
class Row:
    """One arm's figures; null where it failed before there were any."""

    label: str
    words: list[str]
    error: str | None = None
    ratio: Interval | None = None  # samples a second, to the first arm's
    samples_per_second: float | None = None
    step_ms_p50: float | None = None
    step_ms_p95: float | None = None
    data_wait: float | None = None  # share
    peak_memory_bytes: int | None = None
    compile_s: float | None = None
    pays_after: int | None = None  # updates, until the time to compile has come back
    global_batch: int | None = None
    samples: int | None = None  # to train on
    device: str | None = None
    rates: list[float] = field(default_factory=list)  # of each round
    left: int | None = None  # after so many rounds, where it needed no more
    verdict: noninferiority.Verdict | None = None


@dataclass
class Comparison:
    """What came of it."""

    rows: list[Row]
    said: list[str]
    overrides: list[str]
    settings: Settings
    environment: dict[str, Any]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The content of compare.json: an interval is [estimate, low, high], and null where there were too few rounds."""
        content = asdict(self)
        for row in content["rows"]:
            if row["ratio"] and not row["ratio"].low:
                row["ratio"] = [row["ratio"].middle, None, None]
        return content


@dataclass
class Entry:
    """An arm to be: its label and its job, or what is wrong with it."""

    label: str
    words: list[str]
    job: Job | None
    problems: list[str] = field(default_factory=list)


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """`drivetrain compare`; its exit code."""
    asked, words = arguments.split(argv, Settings)
    afresh("compare", words)
    found = [Entry(j.label, j.words, j.job, j.problems) for j in sweep.prepare([*words, *_own(words)], config_dirs)]
    if len(found) < 2:
        raise UserError("there is nothing to compare: give one key several values, as in precision=fp32,bf16")
    comparison = measure(found, asked, words)
    show(comparison)
    folder = save(comparison, first_job(found), argv)
    print(f"written to {folder}/compare.json and compare.html")
    return FAILED if any(row.error for row in comparison.rows) else DONE


def afresh(verb: str, words: Sequence[str]) -> None:
    """Raise UserError for a run that is to be gone on with: what is measured starts at the beginning."""
    if any(key_of(word) == "resume" for word in words):
        raise UserError(f"drivetrain {verb} measures runs from their beginning: leave resume= out")


def _own(words: Sequence[str]) -> tuple[str, ...]:
    return () if any(key_of(word).split(".")[0] == "saving" for word in words) else OWN


def entry(
    label: str,
    words: Sequence[str],
    config_dirs: Sequence[str] = (),
    own: Sequence[str] | None = None,
    recipe: Recipe | None = None,
) -> Entry:
    """An arm of these words, and of those that are any arm's `own`; of a recipe that was read already, if there is one."""
    given = [*words, *(_own(words) if own is None else own)]
    try:
        return Entry(label, given, prepare_job(given, config_dirs, recipe))
    except UserError as error:
        return Entry(label, given, None, error.problems)


def first_job(entries: Sequence[Entry]) -> Job:
    """The arm that the others are compared to. Raises UserError if it cannot be."""
    if (job := entries[0].job) is None:
        label = entries[0].label
        raise UserError([f"the first arm ({label}) is what the others are compared to: {p}" for p in entries[0].problems])
    return job


def measure(
    entries: Sequence[Entry], asked: Settings, overrides: Sequence[str], leaving: Leaving = stopping.precise
) -> Comparison:
    """Let the arms take turns, then train them to the end if quality is asked for. Raises UserError if the first cannot be."""
    first = first_job(entries)
    import torch  # noqa: F401 - once, here; the arms are forked

    began = time.perf_counter()
    root = Path(first.run.values["output_dir"])
    folder = directory.create(root, "compare", "arms")
    with Steps() as steps, ended_by_signals() as raise_if_interrupted:

        def say(text: str, left: float | None = None) -> None:
            raise_if_interrupted()
            steps(text, left)

        try:
            arms = [Arm(e.label, e.job, folder / str(n)) if e.job is not None else None for n, e in enumerate(entries)]
            able = [arm for arm in arms if arm is not None]
            take_turns(able, asked.rounds, asked.turn_s, say, leaving)
        finally:
            directory.remove(folder)
        rows = [_row(e, arm, able[0]) for e, arm in zip(entries, arms, strict=True)]
        if asked.quality:
            noninferiority.judge(rows, entries, asked.seeds, root, say)
    facts = environment.describe(list(overrides), first.config_hash, {})
    return Comparison(rows, _same_work(able), list(overrides), asked, facts, time.perf_counter() - began)


def _row(entry: Entry, arm: Arm | None, base: Arm) -> Row:
    if arm is None:
        return Row(entry.label, entry.words, error="; ".join(entry.problems))
    row = Row(entry.label, entry.words, arm.error, left=arm.left)
    for fact in ("compile_s", "global_batch", "samples", "device"):
        setattr(row, fact, arm.facts.get(fact))
    if arm.error is not None or not arm.turns:
        return row
    row.rates = [turn.rate for turn in arm.turns]
    steps = sorted(1e3 * s for turn in arm.turns for s in turn.steps)
    row.samples_per_second = statistics.median(row.rates)
    row.step_ms_p50, row.step_ms_p95 = statistics.median(steps), steps[min(len(steps) - 1, int(0.95 * len(steps)))]
    row.data_wait = sum(t.wait for t in arm.turns) / sum(t.seconds for t in arm.turns)
    row.peak_memory_bytes = arm.turns[-1].memory
    if base.error is None:
        row.ratio = (
            Interval(1.0, 1.0, 1.0) if arm is base else ratio(row.rates, [turn.rate for turn in base.turns[: len(row.rates)]])
        )
        if row.compile_s and arm is not base:
            saved = 1 / statistics.median(t.rate for t in base.turns) - 1 / row.samples_per_second  # seconds a sample
            more = row.compile_s - (base.facts.get("compile_s") or 0.0)
            row.pays_after = max(0, round(more / saved / arm.facts["global_batch"])) if saved > 0 else None
    return row


def _same_work(arms: Sequence[Arm]) -> list[str]:
    """In what the arms' work differs, besides what was to be compared."""
    said = []
    for fact, meaning in (("global_batch", "samples make an update"), ("samples", "samples to train on")):
        found = {arm.facts[fact] for arm in arms if fact in arm.facts}
        if len(found) > 1:
            each = ", ".join(f"{arm.label}: {arm.facts[fact]:,}" for arm in arms if fact in arm.facts)
            said.append(f"the arms do not do the same work: {meaning}, {each}")
    return said


def save(comparison: Comparison, job: Job, argv: Sequence[str], verb: str = "compare") -> Path:
    """compare.json and compare.html, in a folder of their own under the run's output_dir."""
    from drivetrain.measure.report.html import comparison_page

    folder = directory.create(Path(job.run.values["output_dir"]), "compare")
    write_json(folder / "compare.json", comparison.as_dict())
    (folder / "compare.html").write_text(comparison_page(comparison, argv, verb))
    return folder


def show(comparison: Comparison) -> None:
    """The table in the terminal: where that is narrow, without the columns that matter least."""
    header, rows = grid(comparison)
    left_out = terminal.fit(header, rows, ("p95", "data wait", "step p50", "memory", "samples/s"))
    terminal.table(header, rows)
    if left_out:
        print(f"not shown here, but in the page: {', '.join(left_out)}")
    for line in comparison.said:
        print(line)


def grid(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table: columns that nobody has a figure for are left out."""
    header = ["arm", "samples/s", "ratio", "95 % interval", "step p50", "p95", "data wait", "memory", "compile", "pays after"]
    rows = [[row.label, *_cells(row, first=not n)] for n, row in enumerate(comparison.rows)]
    if comparison.settings.quality:
        header += ["quality", "because"]
        for cells, row in zip(rows, comparison.rows, strict=True):
            cells += [row.verdict.word, row.verdict.reason] if row.verdict else ["–", ""]
    if any(row.error for row in comparison.rows):
        header.append("error")
        for cells, row in zip(rows, comparison.rows, strict=True):
            cells.append(row.error or "")
    used = [n for n in range(len(header)) if n < 4 or any(cells[n] not in ("–", "") for cells in rows)]
    return [header[n] for n in used], [[cells[n] for n in used] for cells in rows]


def _cells(row: Row, first: bool) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return form.format(value) if value is not None else "–"

    between = "–"
    if row.ratio is not None and not first:
        word = "" if row.ratio.differs else "  no difference" if row.ratio.same else "  not told apart"
        rounds = f"given up after {len(row.rates)}" if row.left else "too few rounds"
        between = f"{row.ratio.low:.3f} – {row.ratio.high:.3f}{word}" if row.ratio.low else rounds
    return [
        number(row.samples_per_second, "{:,.0f}"), number(row.ratio.middle if row.ratio else None, "{:.2f} ×"), between,
        number(row.step_ms_p50, "{:.2f} ms"), number(row.step_ms_p95, "{:.2f} ms"),
        number(100 * row.data_wait if row.data_wait is not None else None, "{:.0f} %"),
        number(row.peak_memory_bytes / 2**30 if row.peak_memory_bytes else None, "{:.2f} GiB"),
        number(row.compile_s, "{:.1f} s"), number(row.pays_after, "{:,} updates"),
    ]  # fmt: skip

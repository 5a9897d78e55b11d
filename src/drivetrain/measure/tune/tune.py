"""`drivetrain tune`: what makes this run faster on this machine, found by measuring and kept only where that is proven."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from drivetrain.core.errors import DONE, UserError
from drivetrain.core.files import write_json
from drivetrain.core.option import Count, Positive
from drivetrain.core.overrides import key_of
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure import arguments
from drivetrain.measure.benchmark import compare, noninferiority, stopping
from drivetrain.measure.benchmark.compare import Comparison, Entry, Row
from drivetrain.measure.benchmark.interleave import Arm
from drivetrain.measure.intervals import ratio
from drivetrain.measure.profile import prescribe
from drivetrain.measure.profile.isolated import apart
from drivetrain.measure.report.html import tuning_page
from drivetrain.measure.tune import candidates, range_test
from drivetrain.run import directory
from drivetrain.ui.progress import Steps

PROOF = "All that was taken on, measured anew"
LATE = 0.1  # of the step's time spent waiting for data: then the loaders are tried again
SEARCH = 0.7  # of the budget: the rest is for the proof
LIKELY = 0.8  # confidence of the search: what it takes on is proven afterwards, and what it misses is lost
SUSPECTS = ("precision", "batch", "compile", "surgery", "checkpointing")  # what may change a result, the likeliest first


class Stage(NamedTuple):
    """Choices that exclude each other, tried against the run as it is by then."""

    title: str
    candidates: Callable[[Job], list[str]]


LOADERS, SPLITS = Stage("how data is read", candidates.loaders), Stage("how a batch is split", candidates.splits)
STAGES = {
    "all": (
        LOADERS, Stage("precision and memory layout", candidates.arithmetic), Stage("the optimizer's step", candidates.updates),
        SPLITS, Stage("compiling", candidates.compilers),
    ),
    "workers": (LOADERS,), "batch": (SPLITS,), "lr": (),
}  # fmt: skip


@dataclass
class Settings:
    """What the command itself can be told."""

    what: Literal["all", "workers", "batch", "lr"] = "all"
    budget_s: Positive = 600.0  # seconds that it may take, about
    rounds: Count = 8
    turn_s: Positive = 0.3
    quality: bool = True  # train the winner and the run as it was to their ends, if the budget is enough for it
    seeds: Count = 5
    lr_updates: Count = 150  # of the range test


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """`drivetrain tune`; its exit code."""
    asked, words = arguments.split(argv, Settings)
    compare.afresh("tune", words)
    job = prepare_job(words, config_dirs)
    tuning = Tuning(asked, words, config_dirs)
    for stage in STAGES[asked.what]:
        tuning.run(stage)
    if asked.what == "all" and tuning.waits > LATE:
        tuning.run(LOADERS)
    proof = tuning.prove() if tuning.taken else None
    tested = _range_test(words, config_dirs, asked) if asked.what in ("all", "lr") else None
    _end(tuning, proof, tested, job, argv)
    return DONE


@dataclass
class Tuning:
    """The run as it is by now, and how it came to be."""

    asked: Settings
    words: list[str]
    config_dirs: Sequence[str]
    taken: dict[str, str] = field(default_factory=dict)  # stage → words
    parts: dict[str, Comparison] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    waits: float = 0.0  # share of the step

    def now(self, without: str | None = None) -> list[str]:
        """The words of the run as it is by now, or would be without one stage's choice."""
        words = self.words
        for title, more in self.taken.items():
            if title != without:
                words = candidates.over(words, more.split(), self.config_dirs)
        return words

    def left(self) -> float:
        """Seconds of the budget."""
        return self.asked.budget_s - (time.monotonic() - self.began)

    def run(self, stage: Stage) -> None:
        """Let a stage's candidates race the run as it is, and take on the best one that is likely to be faster."""
        words = self.now()
        base = compare.entry("as it is", words, self.config_dirs)
        found = [self._entry(more, words) for more in stage.candidates(compare.first_job([base]))]
        entries = [entry for entry in found if entry.job is not None]
        if not entries:
            return
        if self.left() < (1 - SEARCH) * self.asked.budget_s:
            self.said.append(f"not tried for want of time: {stage.title}")
            return
        print(f"\n{stage.title}: {len(entries)} tries", flush=True)
        done = self._measured([base, *entries], partial(self._leaving, time.monotonic() + self.left()))
        self.parts[f"{stage.title.capitalize()}{', again' if stage.title in self.taken else ''}"] = done
        if done.rows[0].error is not None:
            raise UserError(f"the run as it is does not run: {done.rows[0].error}")
        best = _best(done.rows)
        self.waits = (best or done.rows[0]).data_wait or 0.0
        if best is None:
            print("nothing is likely to be faster: it stays")
        else:
            self._take(stage.title, best.label)
            print(f"taken on: {best.label}")

    def _take(self, title: str, more: str) -> None:
        """Take on a stage's choice; what it overrides of another stage's is no longer theirs."""
        left = {t: candidates.under(was.split(), more.split(), self.config_dirs) for t, was in self.taken.items() if t != title}
        self.taken = {t: " ".join(words) for t, words in left.items() if words} | {title: more}

    def _entry(self, more: str, words: Sequence[str]) -> Entry:
        return compare.entry(more, candidates.over(words, more.split(), self.config_dirs), self.config_dirs)

    def _leaving(self, until: float, arms: Sequence[Arm], rounds: int) -> Iterable[Arm]:
        """Those behind; and all, where the time for searching is over."""
        return arms[1:] if time.monotonic() > until - (1 - SEARCH) * self.asked.budget_s else stopping.behind(arms, rounds)

    def _measured(self, entries: Sequence[Entry], leaving: Callable[..., Iterable[Arm]] = lambda *_: ()) -> Comparison:
        asked = compare.Settings(rounds=self.asked.rounds, turn_s=self.asked.turn_s)
        done = compare.measure(entries, asked, self.words, leaving)
        compare.show(done)
        return done

    def prove(self) -> Row | None:
        """Measure all that was taken against the run as it was, anew, and whether it is still right; None if nothing stands.

        Beside it run all but one of each: what is faster without one goes on without it.
        """
        while self.taken:
            print("\nall that was taken on, against the run as it was, and without each", flush=True)
            base = compare.entry("as it was", self.words, self.config_dirs)
            tuned = compare.entry(" ".join(self.taken.values()), self.now(), self.config_dirs)
            titles = list(self.taken) if len(self.taken) > 1 else []
            less = [compare.entry(f"without {self.taken[title]}", self.now(title), self.config_dirs) for title in titles]
            done = self._measured([base, tuned, *less])
            self.parts[PROOF] = done
            row = done.rows[1]
            if (better := _best(done.rows[1:])) is not None:
                title = titles[done.rows.index(better) - 2]
                self.said.append(f"{self.taken.pop(title)} is left out: with the rest it is faster without it")
                continue
            if row.ratio is None or row.ratio.low <= 1:
                self.said.append("together they are not faster beyond doubt: nothing is kept")
                return None
            self._judge(done, [base, tuned])
            if row.verdict is None or row.verdict.word != noninferiority.FAIL:
                return row
            self._take_back(row.verdict.reason)
        return None

    def _judge(self, done: Comparison, entries: Sequence[Entry]) -> None:
        """Train both to their ends, where something was taken that may change the result and there is time for it."""
        groups = {key_of(word).split(".")[0] for more in self.taken.values() for word in more.split()}
        if not self.asked.quality or not groups.intersection(SUSPECTS):
            return
        seconds = sum(_length_s(entry.job, row) for entry, row in zip(entries, done.rows[:2], strict=True))
        seeds = min(self.asked.seeds, int(self.left() / seconds)) if seconds else 0
        if seeds < 3:
            self.said.append(
                f"whether the result is still right was not checked: 3 trainings of each take about {3 * seconds:.0f} s, more "
                f"than is left of budget_s={self.asked.budget_s:g}; drivetrain compare … quality=true does it"
            )
            return
        done.settings.quality, done.settings.seeds = True, seeds
        root = Path(compare.first_job(entries).run.values["output_dir"])
        with Steps() as say:
            noninferiority.judge(done.rows[:2], entries, seeds, root, say)
        found = done.rows[1].verdict
        if found is not None:
            self.said.append(f"quality: {found.word} with {seeds} seeds ({found.reason})")
            print(self.said[-1])

    def _take_back(self, reason: str) -> None:
        """Give up the likeliest cause of a worse result."""
        for group in SUSPECTS:
            for title, more in self.taken.items():
                if any(key_of(word).split(".")[0] == group for word in more.split()):
                    del self.taken[title]
                    self.said.append(f"{more} is taken back, the result was worse: {reason}")
                    return


def _best(rows: Sequence[Row]) -> Row | None:
    """The fastest of those that are likely to be faster than the first."""
    base = rows[0].rates
    ratios = {n: ratio(row.rates, base[: len(row.rates)], LIKELY) for n, row in enumerate(rows) if n and row.rates}
    won = [n for n, found in ratios.items() if found.low > 1]
    return rows[max(won, key=lambda n: ratios[n].middle)] if won else None


def _length_s(job: Job | None, row: Row) -> float:
    """Seconds that the whole run takes at this rate."""
    from drivetrain.core.horizon import run_horizon

    over = run_horizon(job.run, row.samples) if job is not None else None
    if over is None or not row.samples_per_second or not row.global_batch:
        return float("inf")
    return over.updates * row.global_batch / row.samples_per_second + (row.compile_s or 0.0)


def _range_test(words: Sequence[str], config_dirs: Sequence[str], asked: Settings) -> range_test.RangeTest:
    print(f"\nlearning rate range test, {asked.lr_updates} updates", flush=True)
    job = prepare_job(words, config_dirs)
    if job.run.parallel.distributed:  # the global batch is what the rate goes with, on one rank as on many
        job = prepare_job(candidates.over(words, ["parallel=single"], config_dirs), config_dirs)
    found = apart(partial(range_test.run, updates=asked.lr_updates), job)
    print("\n".join(range_test.advice(found)))
    return found


def _end(tuning: Tuning, proof: Row | None, tested: range_test.RangeTest | None, job: Job, argv: Sequence[str]) -> None:
    """What is kept, as a command and a recipe; and the page."""
    folder = directory.create(Path(job.run.values["output_dir"]), "tune")
    print()
    for line in tuning.said:
        print(line)
    if proof is not None:
        base = tuning.parts[PROOF].rows[0]
        more = [w for words in tuning.taken.values() for w in words.split()]
        prescribe.prescribe("tune", tuning.words, more, tuning.config_dirs, base, proof, folder, tuning.said)
    elif tuning.parts:
        print("nothing that was tried is faster beyond doubt: the run stays as it is")
    told: dict[str, Any] = {title: part.as_dict() for title, part in tuning.parts.items()}
    if tested is not None:
        told["range test"] = {"rates": tested.rates, "losses": tested.losses, "steepest": tested.steepest, "bound": tested.bound}
    write_json(folder / "tune.json", told)
    (folder / "tune.html").write_text(tuning_page(tuning.parts, tested, tuning.said, argv))
    print(f"written to {folder}/tune.json and tune.html")

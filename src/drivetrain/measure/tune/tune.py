"""`drivetrain tune`: searches for overrides that make this run faster on this machine, and keeps only proven ones."""

from __future__ import annotations

import logging
import math
import shlex
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from drivetrain.compile.base import eager_only_settings
from drivetrain.config.catalog import option_keys, options
from drivetrain.core.errors import DONE, UserError
from drivetrain.core.machine import accelerators
from drivetrain.core.machine.guards import usable_cores
from drivetrain.core.options.option import Count, Positive, RunSpec
from drivetrain.core.options.overrides import format_value
from drivetrain.core.typed import JsonObject
from drivetrain.engine import child
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.launch.trials import JobTrials
from drivetrain.measure import verbs
from drivetrain.measure.benchmark import compare, quality, variants
from drivetrain.measure.benchmark.compare import Comparison, Row, StoppingRule, behind, titled
from drivetrain.measure.benchmark.variants import (
    MIN_SEEDS,
    TimesToTarget,
    TrainedRun,
    VariantSpec,
    columns,
    in_turns,
    proven,
    trainings,
)
from drivetrain.measure.changes import apply, groups_of, unchanged, with_channels_last
from drivetrain.measure.claims.export import recommend
from drivetrain.measure.tune.range_test import RangeTest, advice, chart, range_test
from drivetrain.ui import sheet
from drivetrain.ui.output import echo
from drivetrain.ui.pages import charts
from drivetrain.ui.progress import Steps

LOOK_UPDATES = 50
NEAR = (0.5, 1.0, 2.0)  # of the noise scale: the batches that are tried


def soonest_batch(target: str, seeds: int, budget_s: float, overrides: list[str], config_dirs: Sequence[str], job: Job) -> int:
    """Measure the noise scale, train the batches near it to the target, rank them, and name those certainly sooner."""
    reach = quality.reach_of(quality.QualitySettings(target=target), job.run)
    if not job.run.batch.fixed_micro_batches or reach is None:
        raise UserError(f"tune target={target} tries values of batch.global_batch: set batch=fixed or batch=accumulate")
    steps = max(2, job.run.batch.accumulation_steps * job.run.parallel.data_ranks())
    look = JobTrials(job).look(steps, LOOK_UPDATES, micro_batches=())
    scale = look["noise_scale"]
    noise = f"gradient noise scale: {f'{scale:,.0f} samples' if scale else 'hidden by the noise'}, over {look['updates']} updates"
    tries = ["", *candidates(job.run, scale, look["samples"])]
    ends = ["stop.at_target=true", f"target={format_value(str(reach))}"]
    tried = [variants.compose(w or "as it is", [*apply(overrides, w.split(), config_dirs), *ends], config_dirs) for w in tries]
    specs = [spec for spec in tried if spec.job is not None]
    with Steps() as progress, trainings("tune", job, reach, progress) as train:
        runs = train_all(len(specs), lambda n, number: train(specs[n], job.run.runtime.seed + number), seeds, budget_s)
    found = [TimesToTarget.of(spec.label, each, str(reach)) for spec, each in zip(specs, runs, strict=True)]
    best, order = proven(found), sorted(found, key=lambda variant: variant.rank)
    kept = found[best].label if best is not None else None
    answer, told = f"None reaches {reach} sooner beyond doubt: the run stays as it is", []
    if kept is not None:
        told = [f"drivetrain train {shlex.join(apply(overrides, kept.split(), config_dirs))}"]
        answer = f"{kept} is sooner at {reach}"
    table = sheet.Table.of(
        {"batch": [variant.label for variant in order], **columns(order, found[0], str(reach))}, name="The batches"
    )
    page = sheet.Sheet(
        "Which batch is the soonest – drivetrain tune", answer, [sheet.words(noise), table, *map(sheet.commands, told)]
    )
    content = {"target": str(reach), "look": look, "variants": [asdict(variant) for variant in found], "kept": kept}
    verbs.leave(job, "tune", page, ["tune", *overrides, f"target={target}"], content)
    return DONE


def candidates(run: RunSpec, noise_scale: float | None, samples: int) -> list[str]:
    """Batches near the noise scale, as overrides, with the learning rate that follows the square root of the batch."""
    size = run.batch.size(0)
    if not noise_scale:
        return []
    parts = run.batch.accumulation_steps * run.parallel.data_ranks()
    found = []
    for share in NEAR:
        doubled = round(math.log2(noise_scale * share / parts))
        batch = int(parts * 2 ** max(0, doubled))
        rate = f"batch.lr_scaling=sqrt batch.base_batch={size}"
        word = f"batch.global_batch={batch} {rate}"
        if batch != size and 2 <= batch <= samples and word not in found:
            found.append(word)
    return found


def train_all(variants: int, train: Callable[[int, int], TrainedRun], seeds: int, seconds: float) -> list[list[TrainedRun]]:
    """The runs of each variant with each seed, trained in turns; after MIN_SEEDS only while there is time."""
    until = time.monotonic() + seconds
    runs: list[list[TrainedRun]] = [[] for _ in range(variants)]
    for number in range(seeds):
        if number >= MIN_SEEDS and time.monotonic() > until:
            break
        for variant in in_turns(range(variants), number):
            runs[variant].append(train(variant, number))
    return runs


MAX_ACCUMULATION_STEPS = 16


def loaders(job: Job) -> list[str]:
    """Every loader, with several numbers of readers, workers or threads where it has such a key."""
    cores = usable_cores()
    counts = sorted({1, max(1, cores // 2), cores, 2 * cores})  # more than the cores: for readers that wait
    found = []
    for option in options()["loader"]:
        counted = sorted(key for key in option_keys("loader", option, ()) if key.startswith("num_"))
        found += [f"loader={option} loader.{counted[0]}={n}" for n in counts] if counted else [f"loader={option}"]
    return [c for c in found if c != "loader=auto"]  # auto itself chooses among the others


def micro_batches(job: Job) -> list[str]:
    """Other splits of the same global batch into micro-batches."""
    if not job.run.batch.fixed_micro_batches:
        return []
    ranks, size = job.run.parallel.data_ranks(), job.run.batch.size(0)
    powers = (2**k for k in range(1, MAX_ACCUMULATION_STEPS.bit_length()))
    steps = [n for n in powers if size % (n * ranks) == 0]
    return ["batch=fixed", *(f"batch=accumulate batch.accumulation_steps={n}" for n in steps)]


def arithmetic(job: Job) -> list[str]:
    """Precision and memory layout, alone and together, because one may be faster only with the other."""
    layouts = with_channels_last(job.run)
    # float16 is for devices without bfloat16; hardly any CPU has it.
    faster = ("bf16", "amp") if accelerators.device_count() else ("bf16",)
    precisions = [f"precision={name}" for name in faster] if job.run.precision.full_float32 else []
    return [*precisions, *layouts, *(f"{precision} {layout}" for precision in precisions for layout in layouts)]


def compilers(job: Job) -> list[str]:
    """Every way to compile the step; a captured step gets the keys reset that would make parts of it run op by op."""
    reset = {"step": "".join(f" {key}={free}" for key, (_, free) in eager_only_settings(job.run).items())}
    return [f"compile={option}{reset.get(option, '')}" for option in options()["compile"]]


def updates(job: Job) -> list[str]:
    """The optimizer's step in one kernel, and no recomputation in the backward."""
    fused = job.composed.plain["optimizer"].get("fused", True)  # null: already the fastest
    return [*(["optimizer.fused=true"] if fused is False else []), "checkpointing=none"]


logger = logging.getLogger(__name__)

MAX_DATA_WAIT = 0.1  # of the step's time; above it the loaders are searched again
PROOF = "All accepted candidates, measured again"
SEARCH_BUDGET = 0.7  # share of the budget; the rest is for the proof
CONFIDENCE = 0.8  # of the search: a candidate that it accepts is proven afterwards, one that it misses is lost
SUSPECTS = ("precision", "batch", "compile", "surgery", "checkpointing")  # groups that may change a result, the likeliest first


# By kind of search: the titles of the stages, and for each the candidates, which exclude each other.
Propose = Callable[[Job], list[str]]
LOADERS: dict[str, Propose] = {"how data is read": loaders}
MICRO_BATCHES: dict[str, Propose] = {"how a batch is split": micro_batches}
STAGES: dict[str, dict[str, Propose]] = {
    "all": {
        **LOADERS,
        "precision and memory layout": arithmetic,
        "the optimizer's step": updates,
        **MICRO_BATCHES,
        "compiling": compilers,
    },
    "workers": LOADERS,
    "batch": MICRO_BATCHES,
    "lr": {},
}


@dataclass
class TuneSettings:
    """The settings of `drivetrain tune`."""

    what: Literal["all", "workers", "batch", "lr"] = "all"
    budget_s: Positive = 600.0  # seconds that it may take, approximately
    rounds: Count = 8
    block_s: Positive = 0.3
    quality: bool = True  # train the winner and the original run to their ends, if the budget is enough for it
    seeds: Count = 5
    lr_updates: Count = 150  # of the range test
    target: str | None = None  # such as accuracy>=0.98: search the global batch that reaches it soonest, instead of speed


def command(argv: list[str], config_dirs: Sequence[str] = (), recipe: Path | None = None) -> int:
    """Run `drivetrain tune`; return its exit code. The proven recipe goes to the file `recipe`, if there is one."""
    settings, overrides = verbs.split(argv, TuneSettings, "tune", recipe)
    job = prepare_job(overrides, config_dirs)
    if settings.target is not None:
        if settings.what not in ("all", "batch") or recipe is not None:
            raise UserError(f"target={settings.target} searches the batch, and prints a command: leave out what= and --recipe")
        return soonest_batch(settings.target, settings.seeds, settings.budget_s, overrides, config_dirs, job)
    tuning = Tuning(settings, overrides, config_dirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of settings that are only tried, would stand between the lines
        for stage in STAGES[settings.what].items():
            tuning.run(*stage)
        if settings.what == "all" and tuning.data_wait > MAX_DATA_WAIT:
            tuning.run(*next(iter(LOADERS.items())))
        proof = tuning.prove() if tuning.accepted else None
        tested = _range_test(overrides, config_dirs, settings) if settings.what in ("all", "lr") else None
    _report(tuning, proof, tested, job, argv, recipe)
    return DONE


@dataclass
class Tuning:
    """The state of a search: the original run, and the candidates that have been accepted."""

    settings: TuneSettings
    overrides: list[str]  # of the original run
    config_dirs: Sequence[str]
    accepted: dict[str, str] = field(default_factory=dict)  # by the stage's title
    comparisons: dict[str, Comparison] = field(default_factory=dict)  # by title
    notes: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    data_wait: float = 0.0  # share of the step
    cut_short: list[str] = field(default_factory=list)  # candidates of the last stage that the end of the time left undecided
    unfinished: list[str] = field(default_factory=list)  # titles of the stages that had such candidates, or were left out

    def current(self, without: str | None = None) -> list[str]:
        """The overrides of the run with all accepted candidates, but that of the stage `without`."""
        overrides = self.overrides
        for title, candidate in self.accepted.items():
            if title != without:
                overrides = apply(overrides, candidate.split(), self.config_dirs)
        return overrides

    def seconds_left(self) -> float:
        """Seconds of the budget that are left."""
        return self.settings.budget_s - (time.monotonic() - self.began)

    def is_over(self) -> bool:
        """True if the time for searching is over: the rest is for the proof."""
        return self.seconds_left() < (1 - SEARCH_BUDGET) * self.settings.budget_s

    def candidates(self, propose: Propose) -> tuple[VariantSpec, list[VariantSpec]]:
        """The run as it is by now, and those of a stage's candidates that can run and change something."""
        overrides = self.current()
        base = self._variant("as it is", overrides)
        job = variants.baseline_job([base])
        composed = [self._variant(c, apply(overrides, c.split(), self.config_dirs)) for c in propose(job)]
        now = job.composed.choices, job.composed.plain
        return base, [s for s in composed if s.job is not None and (s.job.composed.choices, s.job.composed.plain) != now]

    def run(self, title: str, propose: Propose) -> None:
        """Compare a stage's candidates with the current run, and accept the fastest of the likely faster ones."""
        base, specs = self.candidates(propose)
        if not specs:
            return
        if self.is_over():
            self.notes.append(f"not searched, because the time is over: {title}")
            self.unfinished.append(title)
            return
        echo(f"\n{title}: {len(specs)} candidates")
        self.cut_short = []
        done = self._measure([base, *specs], self._stop)
        if self.cut_short:
            self.unfinished.append(title)
        self.comparisons[f"{title.capitalize()}{', again' if title in self.accepted else ''}"] = done
        self.notes += [f"not taken: {row.pays_too_late}" for row in done.rows[1:] if row.pays_too_late]
        best = _best(done.rows)
        self.data_wait = (best or done.rows[0]).data_wait or 0.0
        if best is None:
            echo("no candidate is likely to be faster: nothing changes")
        else:
            self._accept(title, best.label)
            echo(f"accepted: {best.label}")

    def _accept(self, title: str, candidate: str) -> None:
        """Accept a stage's candidate, and drop the overrides of other stages that it replaces."""
        others = {
            t: unchanged(was.split(), candidate.split(), self.config_dirs) for t, was in self.accepted.items() if t != title
        }
        self.accepted = {t: " ".join(overrides) for t, overrides in others.items() if overrides} | {title: candidate}

    def _variant(self, label: str, overrides: Sequence[str]) -> VariantSpec:
        return variants.compose(label, overrides, self.config_dirs)

    def _stop(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The stopping rule: variants that are behind; all of them when the time for searching is over."""
        if not self.is_over():
            return behind(rows)
        self.cut_short = [row.label for row in rows[1:]] if len(rows[0].rates) < self.settings.rounds else []
        return rows[1:]

    def _measure(self, specs: Sequence[VariantSpec], stopping_rule: StoppingRule = lambda rows: ()) -> Comparison:
        settings = compare.CompareSettings(rounds=self.settings.rounds, block_s=self.settings.block_s)
        done = compare.measure(specs, settings, self.overrides, stopping_rule)
        done.raise_if_baseline_failed()
        cut_short = [row for row in done.rows if row.label in self.cut_short and row.stopped_after]
        for row in cut_short:
            row.out_of_time = True
        if cut_short:
            done.notes.append(
                f"the time was over after {cut_short[0].stopped_after} of {settings.rounds} rounds, and {len(cut_short)} of the "
                f"candidates were undecided: a larger budget_s than {self.settings.budget_s:g} measures them to the end"
            )
        compare.sheet_of(done).show()
        return done

    def prove(self) -> Row | None:
        """Compare all accepted candidates together with the original run, and check that the result is still as good.

        The other variants leave out one candidate each: where one of those is faster, that candidate is dropped and the
        comparison repeated. Returns the measured row, or None if nothing is kept.
        """
        self.cut_short = []
        while self.accepted:
            echo("\nall accepted candidates, against the original run, and without each of them")
            base = self._variant("as it was", self.overrides)
            tuned = self._variant(" ".join(self.accepted.values()), self.current())
            titles = list(self.accepted) if len(self.accepted) > 1 else []
            fewer = [self._variant(f"without {self.accepted[title]}", self.current(title)) for title in titles]
            done = self.comparisons[PROOF] = self._measure([base, tuned, *fewer])
            row = done.rows[1]
            if (better := _best(done.rows[1:])) is not None:
                title = titles[done.rows.index(better) - 2]
                self.notes.append(f"{self.accepted.pop(title)} is dropped: the others are faster without it")
                continue
            if row.pays_too_late:
                self.notes.append(f"together they are not worth it, nothing is kept: {row.pays_too_late}")
                return None
            if row.gain is None or row.gain.low <= 1:
                self.notes.append("together they are not faster beyond doubt: nothing is kept")
                return None
            self._check_quality(done, [base, tuned])
            if row.verdict is None or row.verdict.outcome != quality.FAIL:
                return row
            self._drop_suspect(row.verdict.reason)
        return None

    def _check_quality(self, done: Comparison, specs: Sequence[VariantSpec]) -> None:
        """Train both variants to their ends, if a candidate may change the result and there is time for at least 3 seeds."""
        groups = {group for candidate in self.accepted.values() for group in groups_of(candidate.split())}
        if not self.settings.quality or not groups.intersection(SUSPECTS):
            return
        seconds = sum(math.inf if row.run_s is None else row.run_s for row in done.rows[:2])
        seeds = min(self.settings.seeds, int(self.seconds_left() / seconds)) if seconds else 0
        if seeds < MIN_SEEDS:
            self.notes.append(
                f"whether the result is still as good was not checked: {MIN_SEEDS} trainings of each take about "
                f"{MIN_SEEDS * seconds:.0f} s, more than is left of budget_s={self.settings.budget_s:g}; "
                "drivetrain compare … quality=true does it"
            )
            return
        done.settings.quality, done.settings.seeds, done.settings.max_seeds = True, seeds, seeds
        with Steps() as progress:
            for row, verdict in zip(done.rows[:2], quality.judge(specs, done.settings, progress), strict=True):
                row.verdict = verdict
        if verdict is not None:
            self.notes.append(f"quality: {verdict.outcome} with {seeds} seeds ({verdict.reason})")
            echo(self.notes[-1])

    def _drop_suspect(self, reason: str) -> None:
        """Drop the candidate that most likely made the result worse."""
        for group in SUSPECTS:
            for title, candidate in self.accepted.items():
                if group in groups_of(candidate.split()):
                    del self.accepted[title]
                    self.notes.append(f"{candidate} is dropped, because the result was worse: {reason}")
                    return


def _best(rows: Sequence[Row]) -> Row | None:
    """The fastest of the rows that are likely to be faster than the first for the run as it is, with its start-up."""
    ratios = {n: row.faster_for_the_run(rows[0], CONFIDENCE) for n, row in enumerate(rows) if n and row.rates}
    faster = [n for n, found in ratios.items() if found.low > 1]
    return rows[max(faster, key=lambda n: ratios[n].middle)] if faster else None


def _range_test(overrides: Sequence[str], config_dirs: Sequence[str], settings: TuneSettings) -> RangeTest:
    echo()
    logger.info("learning rate range test, %d updates", settings.lr_updates)
    job = prepare_job(overrides, config_dirs)
    if job.run.parallel.distributed:  # the rate depends on the global batch, which one rank can compute as well
        job = prepare_job(apply(overrides, ["parallel=single"], config_dirs), config_dirs)
    tested = child.ask(job.run, partial(range_test, updates=settings.lr_updates), "the range test cannot be made")
    echo("\n".join(advice(tested)))
    return tested


def _report(
    tuning: Tuning, proof: Row | None, tested: RangeTest | None, job: Job, argv: Sequence[str], recipe: Path | None
) -> None:
    """Print the notes and the kept settings, as a command and a recipe; write tune.json and the page."""
    place = verbs.folder(job, "tune")
    echo()
    for note in tuning.notes:
        echo(note)
    told: list[str] = []
    if proof is not None:
        base = tuning.comparisons[PROOF].rows[0]
        changes = [override for candidate in tuning.accepted.values() for override in candidate.split()]
        told = recommend("tune", tuning.overrides, changes, tuning.config_dirs, base, proof, place, tuning.notes, recipe)
    elif tuning.comparisons:
        echo(f"{recipe} is not written" if recipe else "no candidate is kept")
    content: JsonObject = {title: done.as_dict() for title, done in tuning.comparisons.items()}
    if tested is not None:
        content["range test"] = {
            "rates": tested.rates, "losses": tested.losses, "steepest": tested.steepest, "bound": tested.bound,
        }  # fmt: skip
    found = sheet_of(tuning, conclusion(tuning, proof, tested), told, tested)
    echo(sheet.sentence(found.answer))
    verbs.write(place, "tune", found, ["tune", *argv], content)


def sheet_of(tuning: Tuning, answer: str, told: Sequence[str], tested: RangeTest | None) -> sheet.Sheet:
    """The sheet of the findings, with the commands to use them, the notes, the comparisons (proof first), and the range test."""
    found = [
        *([sheet.commands(*told)] if told else []),
        sheet.words(*tuning.notes),
        *titled(dict(reversed(tuning.comparisons.items()))),
    ]
    if tested is not None:
        found += sheet.under(
            "Learning rate range test", sheet.words(*advice(tested)), sheet.PagePart(charts.grid([chart(tested)]))
        )
    return sheet.Sheet("What makes this run faster here – drivetrain tune", answer, found)


def conclusion(tuning: Tuning, proof: Row | None, tested: RangeTest | None) -> str:
    """The findings in one sentence."""
    if proof is not None and proof.gain is not None:
        outcome = proof.verdict.outcome if proof.verdict is not None else ""
        result = {
            quality.PASS: ", and its result is no worse",
            quality.INCONCLUSIVE: "; a few seeds do not tell whether its result is as good",
        }.get(outcome, "; whether its result is as good was not measured")
        return f"With {' '.join(tuning.accepted.values())} the run is {proof.gain.as_fast('it was')}{result}"
    if tuning.comparisons:
        tried = sum(len(done.rows) - 1 for title, done in tuning.comparisons.items() if title != PROOF)
        if tuning.unfinished:
            over = f"before the search of {', '.join(dict.fromkeys(tuning.unfinished))} was done"
            return f"The time was over {over}, and none of {tried} candidates is proven to be faster: the config stays as it was"
        return f"None of the {tried} candidates is measurably faster: the config stays as it was"
    return advice(tested)[0] if tested is not None else "Nothing was searched"

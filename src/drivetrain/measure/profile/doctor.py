"""`drivetrain doctor`: where a step's time goes, what costs the most, and the overrides that are measured to help."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.errors import DONE, UserError
from drivetrain.core.machine.guards import usable_cores
from drivetrain.core.options.option import Count, Positive
from drivetrain.core.typed import JsonObject
from drivetrain.engine import child
from drivetrain.launch import trials
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure import intervals, verbs
from drivetrain.measure.benchmark import compare, variants
from drivetrain.measure.changes import apply, groups_of, with_channels_last
from drivetrain.measure.claims.export import recommend
from drivetrain.runtime import Runtime
from drivetrain.ui import sheet
from drivetrain.ui.output import echo
from drivetrain.ui.progress import Steps

if TYPE_CHECKING:
    from drivetrain.measure.profile.attribution import CodeLine
    from drivetrain.measure.profile.step import StepProfile


# The least share of the time that is reported: of waiting (for data, ranks, evaluation) and of saving.
MIN_WAIT, MIN_SAVING = 0.2, 0.1
MIN_RUN_S = 10.0  # seconds of the whole run that saving or evaluating takes: less is no cost to speak of, whatever its share
# Each own line from MIN_LISTED on is listed, with its interval. The verdict names one that certainly takes MIN_CERTAIN, or
# MIN_LISTED where its remedy is known: created tensors, and loops.
MIN_LISTED, MIN_CERTAIN = 0.03, 0.05
BUSY = 0.2  # of the time the step waits for a core: then it is said
COMPUTE = "compute"  # the problem of a step that has none
LOOP_OPERATIONS = 64  # small operations of one line in one update: a loop over elements
HOST_READ_SHARE = 0.005  # the weight of a host read on a CPU, where it costs nothing


@dataclass
class Problem:
    """One thing that costs time."""

    share: float  # of the whole run's time, spent or to be gained
    name: str
    verdict: str
    evidence: str
    overrides: tuple[str, ...] = ()  # candidates; each is one or more overrides, separated by blanks


def diagnose(profile: StepProfile, job: Job, ranks: int = 1) -> Iterator[Problem]:
    """Yield the problems of a profile. `job` is the profiled one: of a distributed run, one rank by itself."""
    yield from _data(profile, job)
    yield from _ranks(profile, job, ranks)
    yield from _now_and_then(profile, job.run.saving.every_updates, job.run.values["evaluate_every"])
    yield from _own_lines(profile)
    yield from _compute(profile, job, ranks)


def _data(profile: StepProfile, job: Job) -> Iterator[Problem]:
    cores, loader, wait = usable_cores(), job.run.named("loader"), profile.waits_for_data
    reading = f"; reading a batch of {profile.micro_batch} takes {profile.read_ms:.1f} ms" if profile.read_ms is not None else ""
    workers = job.run.loader.num_workers
    if workers > cores:
        yield Problem(
            max(wait.middle, MIN_WAIT),
            "workers",
            f"{workers} loader workers share {cores} cores with the step",
            f"loader.num_workers={workers}; the step waits {wait.middle:.0%} of its time{reading}",
            (f"loader.num_workers={cores}", f"loader.num_workers={max(1, cores // 2)}", "loader=threads", "loader=sync"),
        )
        return
    own = [line for line in profile.lines if line.reads_data and line.interval.low > MIN_CERTAIN]
    if own or wait.low > MIN_WAIT:
        share = max(wait.middle, sum(line.share for line in own))
        where = f"; most of it in {own[0].place}" if own else ""
        candidates = [o for o in ("loader=threads", "loader=workers", "loader=resident") if o != loader]
        candidates += [f"loader.num_workers={cores}"] if 0 < workers < cores else []
        candidates += [f"loader=workers loader.num_workers={2 * cores}"]  # for readers that wait instead of computing
        verdict, evidence = f"the step waits for data {share:.0%} of its time", _range(wait, ": the wait is {}")
        yield Problem(share, "data", verdict, f"{loader}{evidence}{reading}{where}", tuple(candidates))


def _ranks(profile: StepProfile, job: Job, ranks: int) -> Iterator[Problem]:
    lost, total = profile.phases.get("communication", 0.0), sum(profile.phases.values())
    if lost > MIN_WAIT * total:
        fewer = (
            ["batch=accumulate batch.accumulation_steps=2"]
            if job.run.batch.accumulation_steps == 1 and job.run.batch.fixed_micro_batches
            else []
        )
        yield Problem(
            lost / total,
            "ranks",
            f"the ranks cost each other {lost / total:.0%} of the step",
            f"an update of {job.run.batch.size(0)} samples takes {total - lost:.1f} ms on one rank by itself and {lost:.1f} ms "
            f"more among {ranks} ranks: they exchange gradients, wait for the slowest, and share memory and cores",
            ("parallel=single", *fewer),
        )


def _now_and_then(profile: StepProfile, save_every: int | None, evaluate_every: int) -> Iterator[Problem]:
    """The problems outside of updates: saving (by updates and by epochs) and evaluating."""
    epoch_s, epochs = profile.updates * profile.step_ms / 1e3, profile.run_updates / max(1, profile.updates)
    saves = 1 + (profile.updates // save_every if save_every else 0)
    saving_s, evaluation_s = saves * (profile.saving_s or 0.0), profile.evaluation_s / evaluate_every  # of an epoch
    if (share := saving_s / (saving_s + epoch_s)) > MIN_SAVING and saving_s * epochs > MIN_RUN_S:
        yield Problem(
            share,
            "saving",
            f"saving takes {share:.0%} of the time",
            f"{saves} checkpoint{'s' * (saves != 1)} an epoch of {epoch_s:.1f} s, {1e3 * saving_s / saves:.0f} ms each",
            (*(("saving.every_updates=null saving.every_minutes=10",) if save_every else ()), "saving.asynchronous=true"),
        )
    if (share := evaluation_s / (evaluation_s + epoch_s)) > MIN_WAIT and evaluation_s * epochs > MIN_RUN_S:
        yield Problem(
            share,
            "evaluation",
            f"evaluation takes {share:.0%} of the time",
            f"{profile.evaluation_s:.1f} s after every {evaluate_every} epochs of {epoch_s:.1f} s: a larger evaluate_every "
            "saves time, if fewer evaluations are enough for you",
        )


def _own_lines(profile: StepProfile) -> Iterator[Problem]:
    """The problems of the user's own lines, with a remedy where one is known."""
    spread: defaultdict[str, list[CodeLine]] = defaultdict(list)  # over several lines of a function, each of which takes little
    for line in (line for line in profile.lines if not line.reads_data):
        certain, created_ms = line.interval.low, sum(line.created_ms.values())
        created = line.created * line.share
        if line.small_operations >= LOOP_OPERATIONS and certain > MIN_LISTED:
            advice = "use one operation on whole tensors instead (gather, cumsum, bucketize, einsum)"
            evidence = f"{line.place}: {line.operations} operations and {_of_step(line)}: {advice}"
            yield Problem(line.share, "loop", "a Python loop over elements takes the time", evidence)
        elif line.created > 0.5 and line.created * certain > MIN_LISTED:
            names = ", ".join(f"torch.{name}" for name in line.created_ms)
            where = "anew in each step" if profile.device == "cpu" else "on the CPU"
            yield Problem(
                line.share,
                "created",
                f"tensors are made {where}",
                f"{line.place}: {names}, {created_ms:.1f} ms and {created:.0%} of the step: pass device=…, create it once, or "
                "draw fewer numbers",
            )
        elif certain > MIN_CERTAIN:
            verdict = f"a line of your own takes {line.share:.0%} of the step"
            yield Problem(line.share, "line", verdict, f"{line.place}: `{line.text}`: {_of_step(line)}: {_what(line)}")
        else:
            file, _, function = line.place.rpartition(" in ")
            spread[f"{function} in {file.rpartition(':')[0]}"].append(line)
        if line.host_reads:
            yield Problem(
                max(0.0 if profile.device == "cpu" else line.share, HOST_READ_SHARE),
                "sync",
                "the step reads a value back from the device",
                f"{line.place}: {line.host_reads} times an update; each makes the host wait for the device: keep it a tensor, "
                "and read it every hundred updates",
            )
    for function, lines in spread.items():
        looks = [sum(shares) for shares in zip(*(line.looks for line in lines), strict=False)]
        together = intervals.around(sum(line.share for line in lines), looks)
        if together.low > MIN_CERTAIN:
            most = "; ".join(f"{line.place}, {line.share:.0%}" for line in lines[:3])
            evidence = f"{_percent(together.middle)}{_range(together)}, most of all {most}"
            yield Problem(together.middle, "lines", f"the lines of {function} take {together.middle:.0%} of the step", evidence)


def _of_step(line: CodeLine) -> str:
    backward = f", {line.backward:.0%} in its backward" if line.backward > 0.005 else ""
    return f"{line.share:.0%}{_range(line.interval)} of the step{backward}"


def _range(interval: intervals.Interval, form: str = " ({})") -> str:
    """An interval of shares in words; "" where it has no width."""
    return form.format(f"{100 * interval.low:.0f} to {interval.high:.0%}") if interval.low != interval.high else ""


def _what(line: CodeLine) -> str:
    """The reason for a line's time, as far as it was seen."""
    if line.wasted > 0.5:
        return "it runs layers whose weights train, but no gradient comes back to them: the loss does not need their result"
    if line.wide > 0.5:
        return f"its operations ({', '.join(line.names)}) compute in float64, which costs at least twice the time of float32"
    if not line.operations and line.waits > 0.5:
        return "the host waits there: it sleeps, or waits for a file, a lock, a socket or another process"
    if line.operations:
        return f"{line.operations} operations an update, most of all {', '.join(line.names)}"
    return "the host computes there, outside of torch's operations"


def _compute(profile: StepProfile, job: Job, ranks: int = 1) -> Iterator[Problem]:
    """The verdict where nothing else is wrong: how to compute faster."""
    top = max((k for k in profile.phases if k not in ("data wait", "communication")), key=lambda k: profile.phases[k])
    precisions, layouts = ["precision=bf16"] if job.run.precision.full_float32 else [], with_channels_last(job.run)
    candidates = [*precisions, *layouts]
    if not job.run.compile.active:
        candidates += ["compile=inductor"] if profile.device == "cpu" else ["compile=inductor", "compile=step"]
    if job.run.checkpointing.active:
        candidates.append("checkpointing=none")
    if ranks == 1 and profile.device == "cpu" and profile.threads < usable_cores():  # ranks share the cores
        candidates.append("runtime.threads=auto")
    candidates += [f"{precision} {layout}" for precision in precisions for layout in layouts]
    verdict = f"no bottleneck: the step computes, most of all in the {top}"
    own = max((line.interval.high for line in profile.lines if not line.reads_data), default=0.0)
    doubts = {"a line of your own may take {} of the step": own if own > 2 * MIN_CERTAIN else 0.0}
    wait = profile.waits_for_data
    doubts["the step may wait for data {} of its time"] = wait.high if wait.low <= MIN_WAIT < wait.high else 0.0
    doubt = max(doubts, key=lambda words: doubts[words])
    if doubts[doubt]:
        busy = ", as this machine is too busy to tell" if profile.queued > BUSY else ""
        verdict = f"no bottleneck is certain{busy}: {doubt.format(f'{doubts[doubt]:.0%}')}"
    yield Problem(HOST_READ_SHARE / 2, COMPUTE, verdict, _largest(profile), tuple(candidates))


def _largest(profile: StepProfile) -> str:
    """The own line that takes most, in words."""
    line = max(profile.lines, key=lambda line: line.share, default=None)
    if line is None or line.share < MIN_LISTED:
        return f"no line of your own takes {MIN_LISTED:.0%} of the step"
    return f"of your own lines most: {line.place}: `{line.text}`: {_of_step(line)}"


SHARE, RANGE, DATA = "of the update", "95 % interval", "data wait"


def sheet_of(found: Diagnosis, faster: Sequence[str] = ()) -> sheet.Sheet:
    """The verdict, the commands of a `faster` run, where an update's time goes, and what was measured."""
    body: list[sheet.Section] = [verdicts(found), *([sheet.commands(*faster)] if faster else [])]
    body += sheet.under("Where the time of an update goes", *profiled(found))
    body += compare.titled(found.comparisons)
    return sheet.Sheet("Where the time goes – drivetrain doctor", conclusion(found), body)


def conclusion(found: Diagnosis) -> str:
    """The greatest cost, and what was measured to help, in one sentence."""
    verdict = found.problems[0].verdict
    verdict = verdict[:1].upper() + verdict[1:] if verdict.split(" ")[0].isalpha() else verdict  # else it begins with a key
    if not found.gains or (ratio := found.gains[0][0].ratio) is None:
        return verdict
    return f"{verdict}; {found.gains[0][0].label} makes it {ratio.as_fast()}"


def verdicts(found: Diagnosis) -> sheet.PagePart:
    """The evidence of the largest problem, and the other problems."""
    first, *others = found.problems
    also = [problem for problem in others if problem.name != COMPUTE]
    most = [_largest(found.profile)] if first.name not in (COMPUTE, "line", "loop", "created") else []
    page = sheet.words(first.evidence, *most, *(f"Also: {problem.verdict}: {problem.evidence}" for problem in also))
    lines = [f"also: {problem.verdict}\n  {problem.evidence}" for problem in also]
    return sheet.PagePart(
        page.html, "\n".join([f"\nverdict: {first.verdict}", *(f"  {line}" for line in (first.evidence, *most)), *lines])
    )


def profiled(found: Diagnosis) -> list[sheet.Section]:
    """The parts of an update's time: its phases, and the lines of the user's code; and the time outside of updates."""
    profile = found.profile
    flops = intervals.mean([turn.flops / 1e12 for turn in profile.turns])
    limits = f"this device: {_between(flops, '{:.3f}')} TFLOP/s of matrix products, {profile.bandwidth / 1e9:.0f} GB/s of copying"
    if work := profile.step_flops:
        shares = intervals.mean([100 * work / turn.step_s / turn.flops for turn in profile.turns])
        rate = work / profile.step_ms / 1e9
        limits += f"; the step: {work / 1e9:.2f} GFLOP, {rate:.3f} TFLOP/s, {_between(shares, '{:.0f}')} % of it"
    notes = [*found.notes, limits]
    if profile.queued > BUSY:
        fewer = ", or set runtime.threads=auto" if profile.device == "cpu" and profile.threads > 1 else ""
        notes.insert(
            0,
            f"The cores of this machine are busy: the step waited for one for {profile.queued:.0%} of the time. That is in no "
            f"figure here, but the intervals are wider for it: ask again when it is idle{fewer}.",
        )
    if profile.utilization:
        notes.append(
            "of the time of an update: " + ", ".join(f"{name} {share:.0%}" for name, share in profile.utilization.items())
        )
    saving = f"{1e3 * profile.saving_s:.0f} ms" if profile.saving_s is not None else "–"
    beside = sheet.Table(("outside the updates", "time"), [  # costs that are paid once, or now and then
        ("an update, not profiled", f"{profile.step_ms:.2f} ms"), ("start-up, once", f"{profile.start_s:.1f} s"),
        ("an evaluation", f"{profile.evaluation_s:.2f} s"), ("a checkpoint", saving),
    ], "Outside the updates")  # fmt: skip
    return [_phases(profile), sheet.words(*notes), _lines(profile), beside]


def _phases(profile: StepProfile) -> sheet.Table:
    """The phases of an update, whose shares add up to 100 %."""
    phases, total = profile.phases, sum(profile.phases.values())
    ranges = {DATA: _range(profile.waits_for_data, "{}")}
    rows = [(name, f"{ms:.2f} ms", _percent(ms / total), ranges.get(name, "")) for name, ms in phases.items()]
    rows.append(("an update", f"{total:.2f} ms", "100%", ""))
    bars = {SHARE: [*phases.values(), total]}
    return sheet.Table(("phase", "time", SHARE, RANGE), rows, "Phases", sortable=True, bars=bars)


def _lines(profile: StepProfile) -> sheet.Table:
    """The lines that an update's time goes to; their shares, and those of the layers that they call, add up to 100 %."""
    found = [(f"{line.place}: {line.text}", line.share, line.layers, _range(line.interval, "{}")) for line in profile.lines]
    found += [(name, share, 0.0, "") for name, share in profile.rest.items()]
    shown = sorted((row for row in found if row[1] + row[2] >= MIN_LISTED), key=lambda row: -row[1] - row[2])
    shown.append(("all else", 1.0 - sum(own + layers for _, own, layers, _ in shown), 0.0, ""))
    rows = [(name, _percent(own), interval, _percent(layers)) for name, own, layers, interval in shown]
    header, bars = ("your line, forward and backward", SHARE, RANGE, "the layers it calls"), {SHARE: [row[1] for row in shown]}
    return sheet.Table(header, rows, "Lines", sortable=True, bars=bars)


def _between(figure: intervals.Interval, form: str) -> str:
    return f"{form.format(figure.middle)} ({form.format(max(0.0, figure.low))} to {form.format(figure.high)})"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share else ""


logger = logging.getLogger(__name__)

COMMUNICATION_ROUNDS = 3  # of the comparison of all ranks with one by itself


@dataclass
class DoctorSettings:
    """The settings of `drivetrain doctor`."""

    profile_s: Positive = 2.0  # seconds of each of several kinds of profile
    rounds: Count = 8
    block_s: Positive = 0.4
    prove: bool = True  # measure the overrides that could help; false: only profile


Gain = tuple[compare.Row, compare.Row]  # of overrides that are faster than the run as it is, and that of the run as it is


@dataclass
class Diagnosis:
    """The doctor's findings: where a step's time goes, the problems (dearest first), and faster settings."""

    profile: StepProfile
    problems: list[Problem]
    gains: list[Gain]
    notes: list[str] = field(default_factory=list)
    comparisons: dict[str, compare.Comparison] = field(default_factory=dict)  # by title: what was measured to find the gains

    def as_dict(self) -> JsonObject:
        """The findings as plain values: doctor.json."""
        profile = self.profile
        own = ("place", "text", "share", "backward", "layers", "operations", "waits", "reads_data")
        lines = [
            {**{key: getattr(line, key) for key in own}, "low": line.interval.low, "high": line.interval.high}
            for line in profile.lines
            if line.share >= MIN_LISTED
        ]
        return {
            "verdict": self.problems[0].verdict, "problems": [asdict(problem) for problem in self.problems], "lines": lines,
            "rest": profile.rest, "waits_for_data": profile.waits_for_data, "phases_ms": profile.phases,
            "step_ms": profile.step_ms, "waits_for_a_core": profile.queued, "start_s": profile.start_s,
            "evaluation_s": profile.evaluation_s, "saving_s": profile.saving_s, "notes": self.notes,
            "faster": [{"overrides": row.label, "ratio": row.ratio} for row, _ in self.gains],
        }  # fmt: skip

    def _repr_html_(self) -> str:
        """The verdict and the phases of an update, for notebooks."""
        return sheet_of(self)._repr_html_()


def command(argv: list[str], config_dirs: Sequence[str] = (), recipe: Path | None = None) -> int:
    """Run `drivetrain doctor`; return its exit code. The best proven override goes to the file `recipe`, if there is one."""
    examine(argv, config_dirs, recipe)
    return DONE


def examine(argv: Sequence[str], config_dirs: Sequence[str] = (), recipe: Path | None = None) -> Diagnosis:
    """Profile a run's step, show where its time goes, try what could help, and return what was found."""
    settings, overrides = verbs.split(argv, DoctorSettings, "doctor", recipe)
    if recipe is not None and not settings.prove:
        raise UserError(f"--recipe {recipe} is for what was measured, and prove=false measures nothing: leave one of them out")
    job = prepare_job(overrides, config_dirs)
    ranks = job.run.parallel.ranks() if job.run.parallel.distributed else 1
    one_rank = _one_rank(job, ranks) if ranks > 1 else []
    with Steps() as progress:
        progress("profiling the step")
        alone = prepare_job(apply(overrides, one_rank, config_dirs), config_dirs)
        trials.choose(alone)
        from drivetrain.measure.profile.step import profile_step  # imports torch, which a wrong word need not wait for

        question = partial(profile_step, profile_s=settings.profile_s, asked=time.monotonic())
        profile = child.ask(alone.run, question, "the run cannot be profiled")
    if ranks > 1:
        profile.phases["communication"] = _communication_ms(overrides, one_rank, config_dirs, settings)
    problems = sorted(diagnose(profile, alone, ranks), key=lambda p: -p.share)
    note = f"of one of {ranks} ranks by itself: a batch of {alone.run.batch.size(0)}, the whole model"
    found = Diagnosis(profile, problems, [], [note] if ranks > 1 else [])
    for section in (*profiled(found), verdicts(found)):
        section.show()
    folder, commands = verbs.folder(job, "doctor"), []
    if settings.prove:
        found.gains = prove(found, overrides, config_dirs, settings)
        if found.gains:
            row, base = found.gains[0]
            commands = recommend("doctor", overrides, row.label.split(), config_dirs, base, row, folder, file=recipe)
        else:
            unwritten = f"; {recipe} is not written" if recipe else ""
            echo(f"\nno candidate is faster beyond doubt: the run stays as it is{unwritten}")
    verbs.write(folder, "doctor", sheet_of(found, commands), ["doctor", *argv], found.as_dict())
    return found


def _one_rank(job: Job, ranks: int) -> list[str]:
    """The overrides that turn a distributed run into one of its ranks by itself, with its samples and its threads."""
    threads = Runtime.of(job.run).thread_count(ranks)
    samples = job.run.batch.size(0) // job.run.parallel.data_ranks()
    return ["parallel=single", f"batch.global_batch={samples}", f"runtime.threads={threads}"]


def _communication_ms(
    overrides: Sequence[str], one_rank: Sequence[str], config_dirs: Sequence[str], settings: DoctorSettings
) -> float:
    """Milliseconds by which an update of all ranks is longer than one rank's alone."""
    specs = [
        variants.compose("one rank by itself", apply(overrides, one_rank, config_dirs), config_dirs),
        variants.compose("all ranks", overrides, config_dirs),
    ]
    benchmark = compare.CompareSettings(rounds=COMMUNICATION_ROUNDS, block_s=settings.block_s)
    alone, together = compare.measure(specs, benchmark, overrides).rows
    if alone.step_ms_p50 is None or together.step_ms_p50 is None:
        raise UserError(f"the ranks cannot be measured: {alone.error or together.error}")
    return max(0.0, together.step_ms_p50 - alone.step_ms_p50)


def prove(found: Diagnosis, overrides: list[str], config_dirs: Sequence[str], settings: DoctorSettings) -> list[Gain]:
    """Measure each problem's overrides against the run as it is, then those that are faster all together.

    Returns those that are faster beyond doubt, the fastest first; the comparisons go into `found`.
    """
    candidates = list(dict.fromkeys(c for problem in found.problems for c in problem.overrides))

    def variant(label: str, changes: str) -> variants.VariantSpec:  # with the run's own saving, which may be the problem
        return variants.compose(label, apply(overrides, changes.split(), config_dirs), config_dirs, own_saving=True)

    base = variant("as it is", "")
    specs = [spec for c in candidates if (spec := variant(c, c)).job is not None]
    if not specs:
        echo("\nno override is known to help with that")
        return []
    logger.info("measuring %d overrides", len(specs))
    echo()
    benchmark = compare.CompareSettings(rounds=settings.rounds, block_s=settings.block_s)
    done = compare.measure([base, *specs], benchmark, overrides, compare.no_gain)
    found.comparisons["What could help, each by itself"] = done
    done.raise_if_baseline_failed()
    compare.sheet_of(done).show()
    faster = [row for row in done.rows[1:] if row.gain is not None and row.gain.low > 1]
    faster.sort(key=lambda row: -row.gain.middle if row.gain else 0.0)
    gains = [(row, done.rows[0]) for row in faster]
    combined = _combine([row.label for row in faster])
    spec = variant(combined, combined)
    if gains and combined not in [row.label for row in faster] and spec.job is not None:
        echo("\ntogether")
        best = faster[0].label
        done = found.comparisons["Together"] = compare.measure([base, variant(best, best), spec], benchmark, overrides)
        compare.sheet_of(done).show()
        alone, together = done.rows[1].gain, done.rows[2].gain
        if together is not None and alone is not None and together.low > 1 and together.middle > alone.middle:
            gains.insert(0, (done.rows[2], done.rows[0]))
    return gains


def _combine(candidates: Sequence[str]) -> str:
    """The candidates together, the best first; one that touches a group of a better one is left out."""
    chosen: list[str] = []
    for candidate in candidates:
        if not groups_of(candidate.split()) & groups_of(" ".join(chosen).split()):
            chosen.append(candidate)
    return " ".join(chosen)

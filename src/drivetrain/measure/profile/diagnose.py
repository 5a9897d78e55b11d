"""Diagnoses a step's profile: what costs time, how much, with its evidence and the overrides that could help."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.core.cpus import usable_cores
from drivetrain.launch.job import Job
from drivetrain.measure.overrides import with_channels_last

if TYPE_CHECKING:
    from drivetrain.measure.profile.attribution import Line
    from drivetrain.measure.profile.step import StepProfile

# The least share of the time that is reported: of waiting (for data, ranks, evaluation), of saving, of a line beyond what the
# model's layers need, of one whose remedy is known: created tensors, and loops.
MIN_WAIT, MIN_SAVING, MIN_LINE, MIN_KNOWN = 0.2, 0.1, 0.1, 0.05
COMPUTE = "compute"  # the problem of a step that has none
LOOP_OPERATIONS = 64  # small operations of one line in one update: a loop over elements
UNFILLED = 1.5  # times the samples a second with a larger batch: the device is not filled
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
    yield from _saving(profile, getattr(job.run.saving, "every_updates", None))
    yield from _evaluation(profile, job.run.values["evaluate_every"])
    own = [*_lines(profile), *(_threads(profile) if ranks == 1 else ())]  # ranks share the cores
    yield from own
    # The cost of the user's lines does not shrink with a larger batch, and too many workers disturb the measurement of one.
    if all(problem.share < MIN_KNOWN for problem in own) and _workers(job) <= usable_cores():
        yield from _batch(profile, job)
    yield from _compute(profile, job)


def _data(profile: StepProfile, job: Job) -> Iterator[Problem]:
    cores, loader = usable_cores(), job.run.named("loader")
    wait = profile.phases["data wait"] / sum(profile.phases.values())
    reading = f"; reading a batch of {profile.micro_batch} takes {profile.read_ms:.1f} ms" if profile.read_ms is not None else ""
    workers = _workers(job)
    if workers > cores:
        yield Problem(
            max(wait, MIN_WAIT),
            "workers",
            f"{workers} loader workers share {cores} cores with the step",
            f"loader.num_workers={workers}; the step waits {wait:.0%} of its time{reading}",
            (f"loader.num_workers={cores}", f"loader.num_workers={max(1, cores // 2)}", "loader=threads", "loader=sync"),
        )
        return
    own = [line for line in profile.lines if line.reads_data and line.share > MIN_LINE]
    if own or wait > MIN_WAIT:
        wait = max(wait, sum(line.share for line in own))
        where = f"; most of it in {own[0].place}" if own else ""
        candidates = [o for o in ("loader=threads", "loader=workers", "loader=resident") if o != loader]
        candidates += [f"loader.num_workers={cores}"] if 0 < workers < cores else []
        candidates += [f"loader=workers loader.num_workers={2 * cores}"]  # for readers that wait instead of computing
        verdict = f"the step waits for data {wait:.0%} of its time"
        yield Problem(wait, "data", verdict, f"{job.run.named('loader')}{reading}{where}", tuple(candidates))


def _workers(job: Job) -> int:
    return getattr(job.run.loader, "num_workers", 0)


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
            ("parallel=single", "parallel.static_graph=true", *fewer),
        )


def _epoch_s(profile: StepProfile) -> float:
    return profile.updates * profile.step_ms / 1e3


def _saving(profile: StepProfile, every_updates: int | None) -> Iterator[Problem]:
    if profile.saving_s is None:
        return
    epoch_s = _epoch_s(profile)
    saves = 1 + (profile.updates // every_updates if every_updates else 0)  # one at the epoch's end
    share = saves * profile.saving_s / (saves * profile.saving_s + epoch_s)
    if share > MIN_SAVING:
        yield Problem(
            share,
            "saving",
            f"saving takes {share:.0%} of the time",
            f"{saves} checkpoint{'s' * (saves != 1)} an epoch of {epoch_s:.1f} s, {1e3 * profile.saving_s:.0f} ms each",
            (*(("saving.every_updates=null saving.every_minutes=10",) if every_updates else ()), "saving.asynchronous=true"),
        )


def _evaluation(profile: StepProfile, evaluate_every: int) -> Iterator[Problem]:
    epoch_s, evaluation_s = _epoch_s(profile), profile.evaluation_s / evaluate_every
    share = evaluation_s / (evaluation_s + epoch_s)
    if share > MIN_WAIT:
        yield Problem(
            share,
            "evaluation",
            f"evaluation takes {share:.0%} of the time",
            f"{profile.evaluation_s:.1f} s after every {evaluate_every} epochs of {epoch_s:.1f} s: a larger evaluate_every "
            "saves time, if fewer evaluations are enough for you",
        )


def _lines(profile: StepProfile) -> Iterator[Problem]:
    """The problems of the user's own lines, whatever they do; for what is known, with its remedy."""
    spread: defaultdict[str, list[Line]] = defaultdict(list)  # over several lines of a function, each of which takes little
    for line in (line for line in profile.lines if not line.reads_data):
        created, created_ms = line.created * line.share, sum(line.created_ms.values())
        if line.small_operations >= LOOP_OPERATIONS and line.share > MIN_KNOWN:
            advice = "use one operation on whole tensors instead (gather, cumsum, bucketize, einsum)"
            evidence = f"{line.place}: {line.operations} operations and {_of_step(line)}: {advice}"
            yield Problem(line.share, "loop", "a Python loop over elements takes the time", evidence)
        elif created > MIN_KNOWN and line.created > 0.5:
            names = ", ".join(f"torch.{name}" for name in line.created_ms)
            where = "anew in each step" if profile.device == "cpu" else "on the CPU"
            yield Problem(
                line.share,
                "created",
                f"tensors are made {where}",
                f"{line.place}: {names}, {created_ms:.1f} ms and {created:.0%} of the step: pass device=…, create it once, or "
                "draw fewer numbers",
            )
        elif line.share > MIN_LINE:
            verdict = f"a line of your own takes {line.share:.0%} of the step"
            yield Problem(line.share, "line", verdict, f"{line.place}: `{line.text}`: {_of_step(line)}: {_what(line)}")
        else:
            spread[line.function].append(line)
        if line.host_reads:
            yield Problem(
                max(0.0 if profile.device == "cpu" else line.share, HOST_READ_SHARE),
                "sync",
                "the step reads a value back from the device",
                f"{line.place}: {line.host_reads} times an update; each makes the host wait for the device: keep it a tensor, "
                "and read it every hundred updates",
            )
    for function, lines in spread.items():
        share = sum(line.share for line in lines)
        if share > MIN_LINE:
            most = "; ".join(f"{line.place}, {line.share:.0%}" for line in lines[:3])
            yield Problem(share, "lines", f"the lines of {function} take {share:.0%} of the step", f"most of all {most}")


def _threads(profile: StepProfile) -> Iterator[Problem]:
    used = profile.threads
    if used is None or used.share < MIN_LINE:
        return
    where = f"{used.place} sets their number" if used.place else "runtime.threads or your own code sets their number"
    yield Problem(
        used.share,
        "threads",
        f"torch computes with {used.number} of {used.cores} cores",
        f"{where}; with a thread for each core an update takes {used.share:.0%} less time",
        () if used.place else (f"runtime.threads={used.cores}",),
    )


def _of_step(line: Line) -> str:
    backward = f", {line.backward:.0%} in its backward" if line.backward > 0.005 else ""
    return f"{line.share:.0%} of the step{backward}"


def _what(line: Line) -> str:
    """What is seen of a line's time."""
    if line.wasted > 0.5:
        return "it runs layers whose weights train, but no gradient comes back to them: the loss does not need their result"
    if line.wide > 0.5:
        return f"its operations ({', '.join(line.names)}) compute in float64, which costs at least twice the time of float32"
    if not line.operations and line.waits > 0.5:
        return "the host waits there: it sleeps, or waits for a file, a lock, a socket or another process"
    if line.operations:
        return f"{line.operations} operations an update, most of all {', '.join(line.names)}"
    return "the host computes there, outside of torch's operations"


def _batch(profile: StepProfile, job: Job) -> Iterator[Problem]:
    if profile.larger_batch is not None and profile.larger_batch > UNFILLED:
        size = job.run.batch.size(0)
        yield Problem(
            (1 - 1 / profile.larger_batch) / 2,
            "batch",
            "the batch is too small to fill the device",
            f"a batch of four times {profile.micro_batch} samples gives {profile.larger_batch:.1f} times the samples a second: "
            "a step's fixed costs outweigh its computation",
            (f"batch.global_batch={4 * size}", "compile=step", "compile=inductor", "optimizer.fused=true"),
        )


def _compute(profile: StepProfile, job: Job) -> Iterator[Problem]:
    """The verdict where nothing else is wrong: how to compute faster."""
    top = max((k for k in profile.phases if k not in ("data wait", "communication")), key=lambda k: profile.phases[k])
    candidates = []
    precisions = ["precision=bf16"] if job.run.precision.full_float32 else []
    layouts = with_channels_last(job.run)
    candidates += [*precisions, *layouts]
    if not job.run.compile.active:
        candidates.append("compile=inductor")
    if job.run.checkpointing.active:
        candidates.append("checkpointing=none")
    candidates += [f"{precision} {layout}" for precision in precisions for layout in layouts]
    verdict = f"no bottleneck: the step computes, most of all in the {top}"
    yield Problem(HOST_READ_SHARE / 2, COMPUTE, verdict, roofline_text(profile), tuple(candidates))


def roofline_text(profile: StepProfile) -> str:
    """How near the step comes to the device's limits."""
    flops, bandwidth, step = profile.roofline
    text = f"this device: {flops / 1e12:.2f} TFLOP/s of matrix products, {bandwidth / 1e9:.0f} GB/s of copying"
    if step:
        rate = step / (profile.step_ms / 1e3)
        text += f"; the step: {step / 1e9:.2f} GFLOP, {rate / 1e12:.3f} TFLOP/s, {rate / flops:.0%} of it"
    return text

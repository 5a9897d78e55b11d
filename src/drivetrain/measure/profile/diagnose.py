"""What costs a run its time, judged from what was found in its step: each with its share, its evidence and what could help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.core.cpus import usable_cores
from drivetrain.launch.job import Job

if TYPE_CHECKING:
    from drivetrain.measure.profile.step import Findings

LATE, OFTEN, LOOP, MADE = 0.2, 0.1, 0.1, 0.05  # shares of the time from which on something is worth a word
MANY = 64  # operations of one line in one update: a loop over elements
ROOM = 1.5  # times as many samples a second with a larger batch: the device is not filled
READS = 0.005  # what a read of the device weighs beside other findings, on a CPU where it costs nothing


@dataclass
class Problem:
    """One thing that costs time."""

    share: float  # of the whole run's time that it takes, or could be had
    name: str  # of its kind
    verdict: str
    evidence: str
    overrides: tuple[str, ...] = ()  # each a set of words that could help, separated by blanks


def diagnose(found: Findings, job: Job, ranks: int = 1) -> Iterator[Problem]:
    """What costs time, each with its share, its evidence and what could help. `job` is what one rank does by itself."""
    yield from _data(found, job)
    yield from _ranks(found, job, ranks)
    yield from _saving(found, job)
    own = list(_lines(found))
    yield from own
    # What the user's lines cost does not grow with the batch either, and too many workers disturb what shows its worth.
    if all(problem.share < MADE for problem in own) and _workers(job) <= usable_cores():
        yield from _batch(found, job)
    yield from _compute(found, job)


def _data(found: Findings, job: Job) -> Iterator[Problem]:
    cores, choice = usable_cores(), job.run.choices["loader"]
    wait = found.phases["data wait"] / sum(found.phases.values())
    reading = f"; reading a batch of {found.micro_batch} takes {found.read_ms:.1f} ms" if found.read_ms is not None else ""
    workers = _workers(job)
    if workers > cores:
        yield Problem(
            max(wait, LATE), "workers", f"{workers} loader workers share {cores} cores with the step",
            f"loader.num_workers={workers}; the step waits {wait:.0%} of its time{reading}",
            (f"loader.num_workers={cores}", f"loader.num_workers={max(1, cores // 2)}", "loader=threads", "loader=sync"),
        )  # fmt: skip
    elif wait > LATE:
        own = [line for line in found.lines if line.of_data and line.share > LATE / 2]
        where = f"; most of it in {own[0].place}" if own else ""
        tries = [f"loader={kind}" for kind in ("threads", "workers", "resident") if kind != choice]
        tries += [f"loader.num_workers={cores}"] if 0 < workers < cores else []
        tries += [f"loader=workers loader.num_workers={2 * cores}"]  # for readers that sleep and do not compute
        yield Problem(
            wait, "data", f"the step waits for data {wait:.0%} of its time", f"{job.run.named('loader')}{reading}{where}",
            tuple(tries),
        )  # fmt: skip


def _workers(job: Job) -> int:
    return getattr(job.run.loader, "num_workers", 0)


def _ranks(found: Findings, job: Job, ranks: int) -> Iterator[Problem]:
    lost, total = found.phases.get("communication", 0.0), sum(found.phases.values())
    if lost > LATE * total:
        fewer = ["batch=accumulate batch.accumulation_steps=2"] if job.run.choices["batch"] == "fixed" else []
        yield Problem(
            lost / total, "ranks", f"the ranks cost each other {lost / total:.0%} of the step",
            f"an update of {job.run.batch.size(0)} samples takes {total - lost:.1f} ms by itself and {lost:.1f} ms more among "
            f"{ranks} ranks: gradients are shared, the slowest is waited for, memory and cores are shared",
            ("parallel=single", "parallel.static_graph=true", *fewer),
        )  # fmt: skip


def _saving(found: Findings, job: Job) -> Iterator[Problem]:
    epoch_s = found.updates * found.step_ms / 1e3
    every = getattr(job.run.saving, "every_updates", None)
    if found.saving_s is not None:
        saves = 1 + (found.updates // every if every else 0)  # one at the epoch's end
        share = saves * found.saving_s / (saves * found.saving_s + epoch_s)
        if share > OFTEN:
            yield Problem(
                share, "saving", f"saving takes {share:.0%} of the time",
                f"{saves} checkpoints an epoch of {epoch_s:.1f} s, {1e3 * found.saving_s:.0f} ms each",
                ("saving.every_updates=null saving.every_minutes=10",) if every else (),
            )  # fmt: skip
    evaluation = found.evaluation_s / job.run.values["evaluate_every"]
    share = evaluation / (evaluation + epoch_s)
    if share > LATE:
        yield Problem(
            share, "evaluation", f"evaluation takes {share:.0%} of the time",
            f"{found.evaluation_s:.1f} s after every {job.run.values['evaluate_every']} epochs of {epoch_s:.1f} s: a larger "
            "evaluate_every spends less, and is for you to weigh",
        )  # fmt: skip


def _lines(found: Findings) -> Iterator[Problem]:
    """Lines of the user's own code."""
    computing = sum(found.phases.get(name, 0.0) for name in ("forward", "loss", "backward")) / sum(found.phases.values())
    for line in (line for line in found.lines if not line.of_data):
        made = sum(line.made.values()) / found.step_ms
        # Its backward has no line of its own: there each operation counts alike.
        share = max(line.share, computing * line.operations / found.operations)
        if line.small >= MANY and share > LOOP:
            yield Problem(
                share, "loop", "a Python loop over elements takes the time", f"{line.place}: {line.operations} operations and "
                f"about {share:.0%} of the step: one operation on whole tensors instead (gather, cumsum, bucketize, einsum)",
            )  # fmt: skip
        elif made > MADE:
            names = ", ".join(f"torch.{name}" for name in line.made)
            where = "on the CPU" if found.device == "cuda" else "anew in each step"
            yield Problem(
                made, "made", f"tensors are made {where}", f"{line.place}: {names}, {sum(line.made.values()):.1f} ms and "
                f"{made:.0%} of the step: say device=… where it is made, make it once, or draw fewer",
            )  # fmt: skip
        elif line.reads:
            yield Problem(
                max(line.share if found.device == "cuda" else 0.0, READS), "sync", "the step reads a value back from the device",
                f"{line.place}: {line.reads} times an update; each makes the host wait for the device: keep it a tensor, and "
                "read it every hundred updates",
            )  # fmt: skip


def _batch(found: Findings, job: Job) -> Iterator[Problem]:
    if found.larger is not None and found.larger > ROOM:
        size = job.run.batch.size(0)
        yield Problem(
            (1 - 1 / found.larger) / 2, "batch", "the batch is too small to fill the device",
            f"four times {found.micro_batch} samples at once go {found.larger:.1f} times as fast: what a step costs besides "
            "computing outweighs it",
            (f"batch.global_batch={4 * size}", "compile=step", "compile=inductor", "optimizer.fused=true"),
        )  # fmt: skip


def _compute(found: Findings, job: Job) -> Iterator[Problem]:
    """What is left when nothing is wrong."""
    choices = job.run.choices
    top = max((k for k in found.phases if k not in ("data wait", "communication")), key=lambda k: found.phases[k])
    tries = []
    if choices["precision"] == "fp32":
        tries.append("precision=bf16")
    if "channels_last" not in choices["surgery"]:
        tries.append(f"surgery=[{','.join([*choices['surgery'], 'channels_last'])}]")
    if choices["compile"] == "none":
        tries.append("compile=inductor")
    if choices["checkpointing"] != "none":
        tries.append("checkpointing=none")
    if len(tries) > 1 and choices["precision"] == "fp32" and "channels_last" not in choices["surgery"]:
        tries.append(f"{tries[0]} {tries[1]}")
    yield Problem(
        READS / 2, "compute", f"nothing is in its way: it computes, most of all the {top}", reached(found), tuple(tries)
    )


def reached(found: Findings) -> str:
    """How near the step comes to what the device can do."""
    flops, bandwidth, step = found.roofline
    text = f"this device: {flops / 1e12:.2f} TFLOP/s of matrix products, {bandwidth / 1e9:.0f} GB/s of copying"
    if step:
        rate = step / (found.step_ms / 1e3)
        text += f"; the step: {step / 1e9:.2f} GFLOP, {rate / 1e12:.3f} TFLOP/s, {rate / flops:.0%} of it"
    return text
